/* SPDX-License-Identifier: Apache-2.0 */
/* Ferry as a party of `bench broadcast`: worker processes whose model stores
 * every tensor whole, a client that hands the calls on over their links, and
 * whole rounds of send_weights through the public interface.
 * Invariant: weights travel by the backend alone; a link carries calls. */
#include "bench/broadcast.h"

#include <ferry/ferry.h>

#include <pthread.h>

/* ---- frames on a link ---- */

typedef struct frame {
    char what;      /* of a call; see serve */
    int32_t status; /* of an answer */
    uint32_t size;
} frame;

static void put(int fd, char what, int32_t status, const char *text)
{
    frame f;

    memset(&f, 0, sizeof(f));
    f.what = what;
    f.status = status;
    f.size = text ? (uint32_t)strlen(text) : 0;
    party_send(fd, &f, sizeof(f));
    party_send(fd, text, f.size);
}

/* The text is owned; NULL: the other end is gone. */
static char *get(int fd, frame *out)
{
    char *text;

    if (!party_recv(fd, out, sizeof(*out)))
        return NULL;
    text = malloc((size_t)out->size + 1);
    if (!party_recv(fd, text, out->size)) {
        free(text);
        return NULL;
    }
    text[out->size] = '\0';
    return text;
}

/* ---- a worker ---- */

typedef struct rank_model {
    party *p;
    size_t cursor;
    ferry_param *params;
    ferry_model model;
    ferry_worker *worker;
} rank_model;

static int32_t shape_of(const party_tensor *t, int64_t *shape)
{
    shape[0] = t->rows;
    shape[1] = t->cols;
    return t->cols ? 2 : 1;
}

static ferry_status model_load(void *self, ferry_loader *loader,
                               const char *name, const ferry_tensor *tensor)
{
    rank_model *m = self;

    /* Names come in order, so the search goes on where it stopped. */
    for (size_t k = 0; k < m->p->n_tensors; k++) {
        size_t i = (m->cursor + k) % m->p->n_tensors;
        const ferry_param *q = &m->params[i];
        ferry_tensor slot;

        if (strcmp(q->name, name) != 0)
            continue;
        m->cursor = i + 1;
        FERRY_TRY(ferry_loader_expect(loader, tensor, q->ndim, q->shape));
        FERRY_TRY(ferry_loader_slot(loader, i, &slot));
        return ferry_load_copy(loader, &slot, tensor);
    }
    return ferry_fail(FERRY_EUNKNOWN, "parameter %s is unknown", name);
}

static void open_model(rank_model *m, party *p)
{
    m->p = p;
    m->params = calloc(p->n_tensors + 1, sizeof(*m->params));
    for (size_t i = 0; i < p->n_tensors; i++) {
        m->params[i].name = p->tensors[i].name;
        m->params[i].dtype = FERRY_DTYPE_BF16;
        m->params[i].ndim = shape_of(&p->tensors[i], m->params[i].shape);
        m->params[i].data = p->own + p->tensors[i].at;
    }
    m->model.size = sizeof(m->model);
    m->model.name = "bench";
    m->model.self = m;
    m->model.params = m->params;
    m->model.n_params = p->n_tensors;
    m->model.load = model_load;
}

static ferry_status answer(rank_model *m, char what, const char *text)
{
    switch (what) {
    case 'i':
        return ferry_worker_init_transfer_engine(m->worker, text);
    case 's':
        return ferry_worker_start_weight_update(m->worker);
    case 'u':
        return ferry_worker_update_weights(m->worker, text);
    case 'f':
        return ferry_worker_finish_weight_update(m->worker, NULL);
    case 'a':
        ferry_worker_abort_weight_update(m->worker);
        return FERRY_OK;
    case 'p':
        memset(m->p->own, PARTY_POISON, m->p->bytes);
        return FERRY_OK;
    case 'c':
        return party_is_good(m->p) ? FERRY_OK
                                   : ferry_fail(FERRY_EDIGEST, "wrong bytes");
    default: /* 'n': does nothing */
        return FERRY_OK;
    }
}

static void serve(party *p, const char *backend)
{
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT(backend);
    static char status_text[1 << 16];
    rank_model m;
    frame f;
    char *text;

    memset(&m, 0, sizeof(m));
    open_model(&m, p);
    wo.dp_rank = p->rank - 1;
    wo.dp_size = p->n_workers;
    if (ferry_worker_create(&wo, &m.model, NULL, &m.worker) < 0)
        party_die("worker: %s", ferry_last_error());
    while ((text = get(p->links[0], &f))) {
        ferry_status status = answer(&m, f.what, text);

        if (f.what == 't') {
            ferry_worker_status(m.worker, status_text, sizeof(status_text));
            put(p->links[0], f.what, 0, status_text);
        } else {
            put(p->links[0], f.what, status,
                status < 0 ? ferry_last_error() : "");
        }
        free(text);
    }
    ferry_worker_destroy(&m.worker);
    free(m.params);
}

/* ---- the client ---- */

typedef struct relay {
    party *p;
    pthread_mutex_t calls; /* one at a time on the links */
} relay;

static ferry_status call_all(relay *r, char what, const char *text, char *out,
                             size_t size)
{
    ferry_status first = FERRY_OK;
    char line[1024] = "";

    pthread_mutex_lock(&r->calls);
    for (int i = 1; i <= r->p->n_workers; i++)
        put(r->p->links[i], what, 0, text);
    for (int i = 1; i <= r->p->n_workers; i++) {
        frame f;
        char *got = get(r->p->links[i], &f);

        if (!got)
            party_die("worker %d is gone", i);
        if (f.status < 0 && first == FERRY_OK) {
            first = (ferry_status)f.status;
            snprintf(line, sizeof(line), "worker %d: %s", i, got);
        }
        if (out && i == 1)
            snprintf(out, size, "%s", got);
        free(got);
    }
    pthread_mutex_unlock(&r->calls);
    return first < 0 ? ferry_fail(first, "%s", line) : FERRY_OK;
}

static ferry_status relay_init(void *self, const char *text)
{
    return call_all(self, 'i', text, NULL, 0);
}

static ferry_status relay_start(void *self)
{
    return call_all(self, 's', "", NULL, 0);
}

static ferry_status relay_update(void *self, const char *text)
{
    return call_all(self, 'u', text, NULL, 0);
}

static ferry_status relay_finish(void *self, const char *version)
{
    (void)version;
    return call_all(self, 'f', "", NULL, 0);
}

static ferry_status relay_abort(void *self)
{
    return call_all(self, 'a', "", NULL, 0);
}

static ferry_status relay_status(void *self, char *buffer, size_t size)
{
    return call_all(self, 't', "", buffer, size);
}

static ferry_status relay_world_size(void *self, int32_t *out_workers)
{
    *out_workers = ((relay *)self)->p->n_workers;
    return FERRY_OK;
}

static const ferry_client_ops relay_ops = {.size = sizeof(ferry_client_ops),
                                           .kind = "bench",
                                           .init_weight_transfer_engine =
                                               relay_init,
                                           .start_weight_update = relay_start,
                                           .update_weights = relay_update,
                                           .finish_weight_update = relay_finish,
                                           .abort_weight_update = relay_abort,
                                           .status = relay_status,
                                           .world_size = relay_world_size};

/* ---- the source ---- */

typedef struct paced {
    party *p;
    ferry_param_meta *metas;
    size_t at;
} paced;

static ferry_status paced_metadata(void *self, const ferry_param_meta **out,
                                   size_t *out_count)
{
    paced *s = self;

    *out = s->metas;
    *out_count = s->p->n_tensors;
    return FERRY_OK;
}

static ferry_status paced_begin(void *self)
{
    ((paced *)self)->at = 0;
    return FERRY_OK;
}

/* A tensor's share of the time that the whole pass takes. */
static void pace(const party *p, size_t size)
{
    double ms = p->pace_ms * (double)size / (double)p->bytes;
    struct timespec t = {(time_t)(ms / 1e3), 0};

    t.tv_nsec = (long)((ms - (double)t.tv_sec * 1e3) * 1e6);
    if (ms > 0)
        nanosleep(&t, NULL);
}

static ferry_status paced_next(void *self, ferry_item *out)
{
    paced *s = self;
    const party_tensor *t;
    int64_t shape[2];
    int32_t ndim;

    if (s->at == s->p->n_tensors)
        return FERRY_DONE;
    t = &s->p->tensors[s->at++];
    pace(s->p, t->size);
    memset(out, 0, sizeof(*out));
    out->name = t->name;
    ndim = shape_of(t, shape);
    ferry_tensor_init(&out->tensor, s->p->source + t->at, FERRY_DTYPE_BF16,
                      ndim, shape);
    return FERRY_OK;
}

static void paced_end(void *self)
{
    (void)self;
}

static const ferry_source_ops paced_ops = {.size = sizeof(ferry_source_ops),
                                           .kind = "bench",
                                           .flags = FERRY_SOURCE_STABLE,
                                           .metadata = paced_metadata,
                                           .begin = paced_begin,
                                           .next = paced_next,
                                           .end = paced_end};

static void open_metas(paced *s, party *p)
{
    s->p = p;
    s->metas = calloc(p->n_tensors + 1, sizeof(*s->metas));
    for (size_t i = 0; i < p->n_tensors; i++) {
        s->metas[i].name = p->tensors[i].name;
        s->metas[i].dtype = FERRY_DTYPE_BF16;
        s->metas[i].ndim = shape_of(&p->tensors[i], s->metas[i].shape);
    }
}

/* ---- the root ---- */

typedef struct lead {
    relay r;
    paced s;
    ferry_trainer *trainer;
    ferry_round_stats stats;
} lead;

static void must(ferry_status status, const char *what)
{
    if (status < 0)
        party_die("%s: %s", what, ferry_last_error());
}

static void open_trainer(lead *l, party *p)
{
    ferry_nccl_trainer_init_info nccl = FERRY_NCCL_TRAINER_INIT_INFO(0);
    ferry_ipc_trainer_init_info ipc = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_client client = {&relay_ops, &l->r};
    ferry_source source = {&paced_ops, &l->s};
    int is_ipc = strcmp(p->way, "ferry_ipc") == 0;

    nccl.master_address = p->addresses[0];
    nccl.digest = strcmp(p->way, "ferry_plain") != 0;
    must(ferry_trainer_init(is_ipc ? &ipc.base : &nccl.base, &client, &source,
                            &l->trainer),
         "init");
}

static double send_ms(lead *l)
{
    ferry_send_options o = FERRY_SEND_OPTIONS_INIT;
    double began = party_now_ms();

    l->stats.size = sizeof(l->stats);
    o.stats = &l->stats;
    must(ferry_trainer_send_weights(l->trainer, &o), "send");
    return party_now_ms() - began;
}

static double noop_ms(lead *l)
{
    double began = party_now_ms();

    must(call_all(&l->r, 'n', "", NULL, 0), "no-op");
    return party_now_ms() - began;
}

static double pass_ms(lead *l)
{
    double began = party_now_ms();
    ferry_item item;

    must(paced_begin(&l->s), "begin");
    while (paced_next(&l->s, &item) == FERRY_OK)
        ;
    return party_now_ms() - began;
}

static const char *check(lead *l)
{
    must(call_all(&l->r, 'p', "", NULL, 0), "poison");
    send_ms(l);
    return call_all(&l->r, 'c', "", NULL, 0) < 0 ? "bad" : "good";
}

static void obey(lead *l)
{
    char line[64];

    while (fgets(line, sizeof(line), stdin)) {
        if (strncmp(line, "round", 5) == 0)
            printf("ms %.4f\n", send_ms(l));
        else if (strncmp(line, "noop", 4) == 0)
            printf("ms %.4f\n", noop_ms(l));
        else if (strncmp(line, "pass", 4) == 0)
            printf("ms %.4f\n", pass_ms(l));
        else if (strncmp(line, "check", 5) == 0)
            printf("%s\n", check(l));
        else if (strncmp(line, "about", 5) == 0)
            printf("{\"path\": \"%s\", \"bytes_sent\": %llu, "
                   "\"peak_bytes\": %llu, \"start_ms\": %.3f, "
                   "\"gather_ms\": %.3f, \"pack_ms\": %.3f, \"wire_ms\": "
                   "%.3f, \"digest_ms\": %.3f, \"finish_ms\": %.3f}\n",
                   l->stats.path, (unsigned long long)l->stats.bytes_sent,
                   (unsigned long long)l->stats.peak_bytes, l->stats.start_ms,
                   l->stats.gather_ms, l->stats.pack_ms, l->stats.wire_ms,
                   l->stats.digest_ms, l->stats.finish_ms);
        fflush(stdout);
    }
}

int bench_broadcast_ferry(party *p)
{
    const char *backend = strcmp(p->way, "ferry_ipc") == 0 ? "ipc" : "nccl";
    lead l;

    if (party_fork(p) > 0) {
        party_open_own(p);
        serve(p, backend);
        return 0;
    }
    memset(&l, 0, sizeof(l));
    party_open_source(p);
    l.r.p = p;
    pthread_mutex_init(&l.r.calls, NULL);
    open_metas(&l.s, p);
    open_trainer(&l, p);
    send_ms(&l);
    printf("ready\n");
    fflush(stdout);
    obey(&l);
    ferry_trainer_shutdown(&l.trainer);
    free(l.s.metas);
    return 0;
}
