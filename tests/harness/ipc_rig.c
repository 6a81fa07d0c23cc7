/* SPDX-License-Identifier: Apache-2.0 */
/* The rig's workers and its client. A worker process serves one call per
 * connection of an abstract socket: a line with the call's name, the text,
 * end; the answer is "STATUS text". Invariant: every wait is bounded by the
 * worker's own bounds or by the process's death. */
#include "harness/ipc_rig.h"
#include "harness/ipc_rig_private.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define TEXT_MAX ((size_t)64 << 20)

/* Workers are forked while a trainer's helper thread may still be ending;
 * they use no lock that it could hold. The thread sanitizer must be told. */
#if defined(__SANITIZE_THREAD__)
const char *__tsan_default_options(void);

const char *__tsan_default_options(void)
{
    return "die_after_fork=0";
}
#endif

/* ---- the model of one rank ---- */

typedef struct rank_model {
    const rig_options *options;
    int32_t tp_rank, tp_size, rank;
    size_t cursor;
    ferry_param *params;
    ferry_step *steps;
    ferry_model model;
    ferry_worker *worker;
    pthread_mutex_t calls;
} rank_model;

static void cut_of(const rank_model *m, const rig_param *p, int64_t *out_at,
                   int64_t *out_n)
{
    int64_t extent = p->shape[p->cut == RIG_ROWS ? 0 : p->ndim - 1];
    int64_t each = extent / m->tp_size;

    *out_at = each * m->tp_rank;
    *out_n = m->tp_rank + 1 == m->tp_size ? extent - *out_at : each;
}

static ferry_status step_run(void *arg, const ferry_tensor *dst,
                             const ferry_tensor *inputs, int32_t n_inputs)
{
    rank_model *m = arg;
    const rig_options *o = m->options;

    (void)n_inputs;
    if (o->action_rank < 0 || o->action_rank == m->rank) {
        if (o->action == RIG_SLEEP)
            usleep((useconds_t)o->trap_ms * 1000);
        if (o->action == RIG_FAIL)
            return ferry_fail(FERRY_EINTERNAL, "trap sprung");
        if (o->action == RIG_KILL)
            raise(SIGKILL);
    }
    return ferry_tensor_copy(dst, &inputs[0]);
}

static ferry_status model_load(void *self, ferry_loader *loader,
                               const char *name, const ferry_tensor *tensor)
{
    rank_model *m = self;

    /* Names come in order, so the search goes on where it stopped. */
    for (size_t k = 0; k < m->options->count; k++) {
        size_t i = (m->cursor + k) % m->options->count;
        const rig_param *p = &m->options->params[i];
        ferry_tensor slot, src = *tensor;
        int64_t at, n;

        if (strcmp(p->name, name) != 0)
            continue;
        m->cursor = i + 1;
        FERRY_TRY(ferry_loader_expect(loader, tensor, p->ndim, p->shape));
        FERRY_TRY(ferry_loader_slot(loader, i, &slot));
        if (p->cut != RIG_WHOLE) {
            cut_of(m, p, &at, &n);
            FERRY_TRY(ferry_tensor_narrow(
                tensor, p->cut == RIG_ROWS ? 0 : p->ndim - 1, at, n, &src));
        }
        if (p->trap)
            return ferry_load_step(loader, &m->steps[i], &slot, 0, &src);
        return ferry_load_copy(loader, &slot, &src);
    }
    return ferry_fail(FERRY_EUNKNOWN, "parameter %s is unknown", name);
}

static rank_model *rank_create(const rig_options *o, int32_t rank)
{
    rank_model *m = calloc(1, sizeof(*m));

    m->options = o;
    m->rank = rank;
    m->tp_size = o->tp_size;
    m->tp_rank = rank % o->tp_size;
    m->params = calloc(o->count + 1, sizeof(*m->params));
    m->steps = calloc(o->count + 1, sizeof(*m->steps));
    for (size_t i = 0; i < o->count; i++) {
        const rig_param *p = &o->params[i];
        ferry_param *q = &m->params[i];
        size_t bytes = ferry_dtype_bytes(p->dtype);
        int64_t at, n;

        q->name = p->name;
        q->dtype = p->dtype;
        q->ndim = p->ndim;
        for (int32_t d = 0; d < p->ndim; d++)
            q->shape[d] = p->shape[d];
        if (p->cut != RIG_WHOLE) {
            cut_of(m, p, &at, &n);
            q->shape[p->cut == RIG_ROWS ? 0 : p->ndim - 1] = n;
        }
        for (int32_t d = 0; d < p->ndim; d++)
            bytes *= (size_t)q->shape[d];
        q->data = malloc(bytes + 1);
        memset(q->data, 0x7f, bytes + 1);
        m->steps[i] = (ferry_step){p->name, step_run, m, 1};
    }
    m->model.size = sizeof(m->model);
    m->model.name = "rig";
    m->model.self = m;
    m->model.params = m->params;
    m->model.n_params = o->count;
    m->model.load = model_load;
    pthread_mutex_init(&m->calls, NULL);
    return m;
}

static ferry_status rank_worker(rank_model *m)
{
    const char *backend = m->options->backend ? m->options->backend : "ipc";
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT(backend);

    wo.commit = m->options->commit;
    wo.tp_rank = m->tp_rank;
    wo.tp_size = m->tp_size;
    wo.dp_rank = m->options->same_replica ? 0 : m->rank / m->tp_size;
    wo.dp_size = m->options->replicas;
    wo.no_progress_ms = m->options->no_progress_ms;
    return ferry_worker_create(&wo, &m->model, NULL, &m->worker);
}

static void rank_destroy(rank_model *m)
{
    ferry_worker_destroy(&m->worker);
    for (size_t i = 0; i < m->options->count; i++)
        free(m->params[i].data);
    pthread_mutex_destroy(&m->calls);
    free(m->params);
    free(m->steps);
    free(m);
}

/* The first byte that is not that of `seed`, as text; false if all are. */
static bool rank_differs(const rank_model *m, uint64_t seed, char *out,
                         size_t size)
{
    for (size_t i = 0; i < m->options->count; i++) {
        const rig_param *p = &m->options->params[i];
        const unsigned char *got = m->params[i].data;
        size_t elem = ferry_dtype_bytes(p->dtype), at = 0;
        int64_t cols = p->ndim ? p->shape[p->ndim - 1] : 1;
        int64_t rows = cols ? (int64_t)(rig_bytes(p) / elem) / cols : 0;
        int64_t r0 = 0, rn = rows, c0 = 0, cn = cols;

        if (p->cut == RIG_ROWS) {
            int64_t inner = p->shape[0] ? rows / p->shape[0] : 0;

            cut_of(m, p, &r0, &rn);
            if (p->ndim == 1) {
                c0 = r0;
                cn = rn;
                r0 = 0;
                rn = 1;
            } else {
                r0 *= inner;
                rn *= inner;
            }
        } else if (p->cut == RIG_COLS) {
            cut_of(m, p, &c0, &cn);
        }
        for (int64_t r = r0; r < r0 + rn; r++) {
            for (size_t b = (size_t)c0 * elem; b < (size_t)(c0 + cn) * elem;
                 b++, at++) {
                uint64_t flat = (uint64_t)r * (uint64_t)cols * elem + b;

                if (got[at] != rig_byte(seed, i, flat)) {
                    snprintf(out, size, "rank %d %s byte %zu", m->rank, p->name,
                             at);
                    return true;
                }
            }
        }
    }
    return false;
}

static ferry_status rank_call(rank_model *m, const char *call, const char *text)
{
    ferry_worker *w = m->worker;

    if (strcmp(call, "init") == 0)
        return ferry_worker_init_transfer_engine(w, text);
    if (strcmp(call, "start") == 0)
        return ferry_worker_start_weight_update(w);
    if (strcmp(call, "update") == 0)
        return ferry_worker_update_weights(w, text);
    if (strcmp(call, "finish") == 0)
        return ferry_worker_finish_weight_update(w, text[0] ? text : NULL);
    return ferry_fail(FERRY_EUNKNOWN, "call %s", call);
}

/* ---- the relay, worker's end ---- */

static void write_all(int fd, const char *bytes, size_t n)
{
    while (n > 0) {
        ssize_t k = send(fd, bytes, n, MSG_NOSIGNAL);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return;
        bytes += k;
        n -= (size_t)k;
    }
}

/* Reads until the other end has finished; NUL terminated. */
static char *read_all(int fd)
{
    size_t n = 0, capacity = 4096;
    char *text = malloc(capacity + 1);

    for (;;) {
        ssize_t k = recv(fd, text + n, capacity - n, 0);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            break;
        n += (size_t)k;
        if (n == capacity && capacity < TEXT_MAX)
            text = realloc(text, (capacity *= 2) + 1);
    }
    text[n] = '\0';
    return text;
}

typedef struct connection {
    rank_model *model;
    int fd;
} connection;

static void *serve_one(void *arg)
{
    connection c = *(connection *)arg;
    char *text = read_all(c.fd), *body = strchr(text, '\n');
    static char answer[8192];
    char small[8192];
    ferry_status status;

    free(arg);
    if (body)
        *body++ = '\0';
    else
        body = text;
    if (strcmp(text, "abort") == 0) {
        ferry_worker_abort_weight_update(c.model->worker);
        snprintf(small, sizeof(small), "0 ");
    } else if (strcmp(text, "status") == 0) {
        snprintf(small, sizeof(small), "0 ");
        ferry_worker_status(c.model->worker, small + 2, sizeof(small) - 2);
    } else {
        pthread_mutex_lock(&c.model->calls);
        if (strcmp(text, "check") == 0) {
            bool bad = rank_differs(c.model, strtoull(body, NULL, 10), answer,
                                    sizeof(answer));

            snprintf(small, sizeof(small), "%d %.4000s", bad ? -1 : 0,
                     bad ? answer : "");
        } else {
            status = rank_call(c.model, text, body);
            snprintf(small, sizeof(small), "%d %s", (int)status,
                     status < 0 ? ferry_last_error() : "");
        }
        pthread_mutex_unlock(&c.model->calls);
    }
    write_all(c.fd, small, strlen(small));
    close(c.fd);
    free(text);
    return NULL;
}

static void serve(rank_model *m, int listener)
{
    for (;;) {
        connection *c = malloc(sizeof(*c));
        pthread_t thread;

        c->model = m;
        c->fd = accept(listener, NULL, NULL);
        if (c->fd < 0) {
            free(c);
            continue;
        }
        pthread_create(&thread, NULL, serve_one, c);
        pthread_detach(thread);
    }
}

/* ---- the rig ---- */

struct rig {
    rig_options options;
    int32_t n_ranks;
    pid_t pids[RIG_RANKS_MAX];
    char names[RIG_RANKS_MAX][64];
    rank_model *local[RIG_RANKS_MAX];
    ferry_client local_client;
    pthread_mutex_t lock;
    int fds[RIG_RANKS_MAX]; /* of the call in flight, for cancel */
    bool canceled;
    bool passed_by[RIG_RANKS_MAX];
    char text[8192];
};

static socklen_t address_of(const char *name, struct sockaddr_un *a)
{
    memset(a, 0, sizeof(*a));
    a->sun_family = AF_UNIX;
    strcpy(a->sun_path + 1, name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                       strlen(name));
}

/* The listener lives in the worker alone: with its death a call is refused
 * rather than left waiting. */
static void start_process(rig *r, int32_t rank)
{
    struct sockaddr_un a;
    socklen_t length;
    pid_t parent;
    int listener;

    snprintf(r->names[rank], sizeof(r->names[rank]), "ferry-rig-%d-%d-%p",
             (int)getpid(), rank, (void *)r);
    length = address_of(r->names[rank], &a);
    listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&a, length) != 0 ||
        listen(listener, 16) != 0)
        abort();
    parent = getpid();
    r->pids[rank] = fork();
    if (r->pids[rank] == 0) {
        rank_model *m = rank_create(&r->options, rank);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(4); /* it died before that was in force */
        if (rank_worker(m) < 0) {
            fprintf(stderr, "rig worker: %s\n", ferry_last_error());
            _exit(3);
        }
        serve(m, listener);
    }
    close(listener);
}

rig *rig_open(const rig_options *options)
{
    rig *r = calloc(1, sizeof(*r));
    ferry_client clients[RIG_RANKS_MAX];

    r->options = *options;
    if (r->options.tp_size == 0)
        r->options.tp_size = 1;
    if (r->options.replicas == 0)
        r->options.replicas = 1;
    r->n_ranks = r->options.tp_size * r->options.replicas;
    pthread_mutex_init(&r->lock, NULL);
    for (int32_t i = 0; i < r->n_ranks; i++)
        r->fds[i] = -1;
    for (int32_t i = 0; i < r->n_ranks; i++) {
        if (!options->local) {
            start_process(r, i);
            continue;
        }
        r->local[i] = rank_create(&r->options, i);
        if (rank_worker(r->local[i]) < 0 ||
            ferry_client_local(r->local[i]->worker, &clients[i]) < 0) {
            fprintf(stderr, "rig: %s\n", ferry_last_error());
            abort();
        }
    }
    if (options->local &&
        ferry_client_fanout(clients, (size_t)r->n_ranks, &r->local_client) < 0)
        abort();
    return r;
}

static void stop_process(rig *r, int32_t rank)
{
    kill(r->pids[rank], SIGKILL);
    waitpid(r->pids[rank], NULL, 0);
}

void rig_close(rig *r)
{
    ferry_client_close(&r->local_client);
    for (int32_t i = 0; i < r->n_ranks; i++) {
        if (r->options.local) {
            rank_destroy(r->local[i]);
        } else {
            stop_process(r, i);
        }
    }
    pthread_mutex_destroy(&r->lock);
    free(r);
}

pid_t rig_pid(const rig *r, int32_t rank)
{
    return r->pids[rank];
}

void rig_restart(rig *r, int32_t rank)
{
    stop_process(r, rank);
    start_process(r, rank);
}

int rig_fds(const rig *r, int32_t rank)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)r->pids[rank]);
    return rig_count_entries(path);
}

/* ---- the relay, client's end ---- */

static int ask(const rig *r, int32_t rank, const char *call, const char *text)
{
    struct sockaddr_un a;
    socklen_t length = address_of(r->names[rank], &a);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval bound = {60, 0};

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof(bound));
    if (connect(fd, (struct sockaddr *)&a, length) != 0) {
        close(fd);
        return -1;
    }
    write_all(fd, call, strlen(call));
    write_all(fd, "\n", 1);
    write_all(fd, text, strlen(text));
    shutdown(fd, SHUT_WR);
    return fd;
}

static ferry_status answer(int32_t rank, int fd, char *out, size_t size)
{
    char *text = read_all(fd), *body = strchr(text, ' ');
    ferry_status status;

    if (!body) {
        free(text);
        return ferry_fail(FERRY_ECONN, "rank %d closed the connection", rank);
    }
    status = (ferry_status)atoi(text);
    if (out)
        snprintf(out, size, "%s", body + 1);
    if (status < 0)
        ferry_fail(status, "rank %d: %s", rank, body + 1);
    free(text);
    return status;
}

static bool set_fd(rig *r, int32_t rank, int fd)
{
    bool canceled;

    pthread_mutex_lock(&r->lock);
    if (fd < 0 && r->fds[rank] >= 0)
        close(r->fds[rank]);
    r->fds[rank] = fd;
    canceled = r->canceled;
    pthread_mutex_unlock(&r->lock);
    return canceled;
}

static bool passes_by(const rig *r, int32_t rank, const char *call)
{
    return r->passed_by[rank] && strcmp(call, "update") == 0;
}

void rig_pass_by(rig *r, int32_t rank)
{
    r->passed_by[rank] = true;
}

static ferry_status call_all(rig *r, const char *call, const char *text)
{
    char line[1024] = "";
    ferry_status first = FERRY_OK;

    pthread_mutex_lock(&r->lock);
    r->canceled = false;
    pthread_mutex_unlock(&r->lock);
    for (int32_t i = 0; i < r->n_ranks; i++) {
        if (!passes_by(r, i, call))
            set_fd(r, i, ask(r, i, call, text));
    }
    for (int32_t i = 0; i < r->n_ranks; i++) {
        ferry_status status;

        if (passes_by(r, i, call))
            continue;
        status = r->fds[i] < 0 ? ferry_fail(FERRY_ECONN, "rank %d is gone", i)
                               : answer(i, r->fds[i], NULL, 0);
        if (set_fd(r, i, -1) && status < 0)
            status = ferry_fail(FERRY_ECANCELED, "call canceled");
        if (status < 0 && first == FERRY_OK) {
            first = status;
            snprintf(line, sizeof(line), "%s", ferry_last_error());
        }
    }
    return first < 0 ? ferry_fail(first, "%s", line) : FERRY_OK;
}

ferry_status rig_call(rig *r, const char *call, const char *text)
{
    if (!r->options.local)
        return call_all(r, call, text);
    for (int32_t i = 0; i < r->n_ranks; i++)
        FERRY_TRY(rank_call(r->local[i], call, text));
    return FERRY_OK;
}

static ferry_status relay_init(void *self, const char *text)
{
    return call_all(self, "init", text);
}

static ferry_status relay_start(void *self)
{
    return call_all(self, "start", "");
}

static ferry_status relay_update(void *self, const char *text)
{
    return call_all(self, "update", text);
}

static ferry_status relay_finish(void *self, const char *version)
{
    return call_all(self, "finish", version ? version : "");
}

static void relay_cancel(void *self)
{
    rig *r = self;

    pthread_mutex_lock(&r->lock);
    r->canceled = true;
    for (int32_t i = 0; i < r->n_ranks; i++) {
        if (r->fds[i] >= 0)
            shutdown(r->fds[i], SHUT_RDWR);
    }
    pthread_mutex_unlock(&r->lock);
}

static ferry_status relay_abort(void *self)
{
    rig *r = self;

    for (int32_t i = 0; i < r->n_ranks; i++) {
        int fd = ask(r, i, "abort", "");

        if (fd >= 0) {
            answer(i, fd, NULL, 0);
            close(fd);
        }
    }
    return FERRY_OK;
}

static ferry_status relay_status(void *self, char *buffer, size_t size)
{
    int fd = ask(self, 0, "status", "");
    ferry_status status;

    if (fd < 0)
        return ferry_fail(FERRY_ECONN, "rank 0 is gone");
    status = answer(0, fd, buffer, size);
    close(fd);
    return status;
}

static ferry_status relay_world_size(void *self, int32_t *out_workers)
{
    *out_workers = ((rig *)self)->n_ranks;
    return FERRY_OK;
}

ferry_client rig_client(rig *r)
{
    static const ferry_client_ops ops = {.size = sizeof(ferry_client_ops),
                                         .kind = "rig",
                                         .init_weight_transfer_engine =
                                             relay_init,
                                         .start_weight_update = relay_start,
                                         .update_weights = relay_update,
                                         .finish_weight_update = relay_finish,
                                         .cancel = relay_cancel,
                                         .abort_weight_update = relay_abort,
                                         .status = relay_status,
                                         .world_size = relay_world_size};

    return r->options.local ? r->local_client : (ferry_client){&ops, r};
}

const char *rig_differs(rig *r, uint64_t seed)
{
    char number[32];

    snprintf(number, sizeof(number), "%llu", (unsigned long long)seed);
    for (int32_t i = 0; i < r->n_ranks; i++) {
        if (r->options.local) {
            if (rank_differs(r->local[i], seed, r->text, sizeof(r->text)))
                return r->text;
        } else {
            int fd = ask(r, i, "check", number);
            ferry_status status;

            if (fd < 0)
                return "a rank is gone";
            status = answer(i, fd, r->text, sizeof(r->text));
            close(fd);
            if (status < 0)
                return r->text;
        }
    }
    return NULL;
}

const char *rig_status(rig *r, int32_t rank)
{
    int fd;

    if (r->options.local) {
        ferry_worker_status(r->local[rank]->worker, r->text, sizeof(r->text));
        return r->text;
    }
    fd = ask(r, rank, "status", "");
    if (fd < 0)
        return "gone";
    answer(rank, fd, r->text, sizeof(r->text));
    close(fd);
    return r->text;
}
