/* SPDX-License-Identifier: Apache-2.0 */
/* Full updates over ipc into worker processes, beside plain memcpy of the
 * same bytes by as many processes and the reference loop (shared memory read
 * once with non-temporal stores). All ways run in turn, round after round, so
 * that a busy machine slows them alike; medians and spreads are printed.
 *   bench_ipc [--json] [--rounds N] [--only SET] [--small]
 * Every byte ends in the rank's own storage; after the last round it is
 * compared with bytes computed without the library. */
#include "harness/ipc_rig.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ROUNDS_MAX 101
#define GOAL_RATIO 1.15

static int rounds = 9;
static bool json;
static const char *only; /* sets whose name holds this */

static double now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* ---- the shape sets ---- */

typedef struct shapes {
    rig_param *params;
    size_t count;
    uint64_t bytes;
} shapes;

static void add(shapes *s, const char *name, int64_t rows, int64_t cols,
                rig_cut cut)
{
    rig_param *p;

    s->params = realloc(s->params, (s->count + 1) * sizeof(*s->params));
    p = &s->params[s->count++];
    memset(p, 0, sizeof(*p));
    p->name = strdup(name);
    p->dtype = FERRY_DTYPE_BF16;
    p->ndim = cols ? 2 : 1;
    p->shape[0] = rows;
    p->shape[1] = cols;
    p->cut = cut;
    s->bytes += (uint64_t)rows * (uint64_t)(cols ? cols : 1) * 2;
}

/* SmolLM2-135M: 272 tensors, tied head. */
static shapes smol(int n_layers)
{
    static const struct {
        const char *name;
        int64_t rows, cols;
        rig_cut cut;
    } layer[] = {
        {"input_layernorm", 576, 0, RIG_WHOLE},
        {"self_attn.q_proj", 576, 576, RIG_ROWS},
        {"self_attn.k_proj", 192, 576, RIG_ROWS},
        {"self_attn.v_proj", 192, 576, RIG_ROWS},
        {"self_attn.o_proj", 576, 576, RIG_COLS},
        {"post_attention_layernorm", 576, 0, RIG_WHOLE},
        {"mlp.gate_proj", 1536, 576, RIG_ROWS},
        {"mlp.up_proj", 1536, 576, RIG_ROWS},
        {"mlp.down_proj", 576, 1536, RIG_COLS},
    };
    shapes s = {0};
    char name[128];

    add(&s, "model.embed_tokens.weight", 49152, 576, RIG_ROWS);
    for (int i = 0; i < n_layers; i++) {
        for (size_t k = 0; k < sizeof(layer) / sizeof(layer[0]); k++) {
            snprintf(name, sizeof(name), "model.layers.%d.%s.weight", i,
                     layer[k].name);
            add(&s, name, layer[k].rows, layer[k].cols, layer[k].cut);
        }
    }
    add(&s, "model.norm.weight", 576, 0, RIG_WHOLE);
    return s;
}

/* 1 GiB of larger tensors, all cut by rows. */
static shapes large(int n_tensors)
{
    shapes s = {0};
    char name[64];

    for (int i = 0; i < n_tensors; i++) {
        snprintf(name, sizeof(name), "layers.%d.weight", i);
        add(&s, name, 4096, 4096, RIG_ROWS);
    }
    return s;
}

static void free_shapes(shapes *s)
{
    for (size_t i = 0; i < s->count; i++)
        free((char *)(uintptr_t)s->params[i].name);
    free(s->params);
}

/* ---- the loops to compare with: one process a rank ---- */

typedef struct copier {
    pid_t pid;
    int go[2], done[2];
} copier;

/* The reference: whole cache lines stored past the cache. */
static void copy_stream(char *dst, const char *src, size_t n)
{
#if defined(__AVX2__) || defined(__SSE2__)
    size_t i = 0;

    for (; i + 64 <= n; i += 64) {
        const __m128i *from = (const __m128i *)(src + i);
        __m128i *to = (__m128i *)(dst + i);
        __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);

        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
    memcpy(dst + i, src + i, n - i);
#else
    memcpy(dst, src, n);
#endif
}

/* Each rank copies its share: 1 / tp of the bytes, in one piece a tensor. */
static void copier_run(const copier *c, const shapes *s, const char *arena,
                       int32_t tp_rank, int32_t tp_size)
{
    size_t own = s->bytes / (uint64_t)tp_size + 64 * s->count;
    char *storage = mmap(NULL, own, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char way;

    memset(storage, 0x7f, own);
    while (read(c->go[0], &way, 1) == 1) {
        size_t from = 0, to = 0;

        for (size_t i = 0; i < s->count; i++) {
            size_t n =
                (size_t)s->params[i].shape[0] *
                (size_t)(s->params[i].ndim == 2 ? s->params[i].shape[1] : 1) *
                2;
            size_t each = n / (size_t)tp_size / 64 * 64;
            const char *src = arena + from + each * (size_t)tp_rank;

            if (way == 's')
                copy_stream(storage + to, src, each);
            else
                memcpy(storage + to, src, each);
            from += n;
            to += each;
        }
        if (write(c->done[1], &way, 1) != 1)
            break;
    }
    _exit(0);
}

static void copiers_start(copier *c, const shapes *s, const char *arena,
                          int32_t tp_size, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (pipe(c[i].go) != 0 || pipe(c[i].done) != 0)
            abort();
        c[i].pid = fork();
        if (c[i].pid == 0) {
            /* The ends of the others would keep them alive. */
            for (int32_t k = 0; k <= i; k++)
                close(c[k].go[1]);
            copier_run(&c[i], s, arena, i % tp_size, tp_size);
        }
    }
}

static double copiers_time(copier *c, int32_t n, char way)
{
    double began = now_ms();
    char done;

    for (int32_t i = 0; i < n; i++) {
        if (write(c[i].go[1], &way, 1) != 1)
            abort();
    }
    for (int32_t i = 0; i < n; i++) {
        if (read(c[i].done[0], &done, 1) != 1)
            abort();
    }
    return now_ms() - began;
}

static void copiers_stop(copier *c, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        kill(c[i].pid, SIGKILL);
        waitpid(c[i].pid, NULL, 0);
        close(c[i].go[0]);
        close(c[i].go[1]);
        close(c[i].done[0]);
        close(c[i].done[1]);
    }
}

/* ---- Ferry ---- */

/* A client that asks workers to hash what they load although the trainer
 * sends no digests: the goal is stated for the worker's digest alone. */
typedef struct hashing_client {
    ferry_client inner;
    ferry_client_ops ops;
} hashing_client;

static ferry_client *hashing_inner; /* of the init call that runs */

static ferry_status init_hashing(void *self, const char *text)
{
    char *copy = strdup(text), *at = strstr(copy, "\"digest\":false");
    ferry_status status;

    if (at)
        memcpy(at, "\"digest\":true ", 14);
    status = hashing_inner->ops->init_weight_transfer_engine(self, copy);
    free(copy);
    return status;
}

typedef enum hashing { HASH_NONE, HASH_WORKER, HASH_BOTH } hashing;

typedef struct mode {
    const char *name;
    const char *path;
    hashing hash;
} mode;

static const mode modes[] = {
    {"shared", NULL, HASH_NONE},
    {"shared, worker's digest", NULL, HASH_WORKER},
    {"shared, both digests", NULL, HASH_BOTH},
    {"ring, worker's digest", "ring", HASH_WORKER},
    {"ring, both digests", "ring", HASH_BOTH},
    {"cma, worker's digest", "cma", HASH_WORKER},
};
#define N_MODES ((int)(sizeof(modes) / sizeof(modes[0])))

typedef struct runner {
    rig *r;
    ferry_client client;
    hashing_client hashing;
    ferry_trainer *t;
} runner;

static void die(const char *what)
{
    fprintf(stderr, "bench_ipc: %s: %s\n", what, ferry_last_error());
    exit(1);
}

static void runner_open(runner *u, const mode *m, const shapes *s,
                        int32_t tp_size, int32_t replicas,
                        const ferry_source *source)
{
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    rig_options ro = {.params = s->params,
                      .count = s->count,
                      .tp_size = tp_size,
                      .replicas = replicas};

    info.path = m->path;
    info.digest = m->hash == HASH_BOTH;
    u->r = rig_open(&ro);
    u->client = rig_client(u->r);
    if (m->hash == HASH_WORKER) {
        u->hashing.inner = u->client;
        u->hashing.ops = *u->client.ops;
        u->hashing.ops.init_weight_transfer_engine = init_hashing;
        hashing_inner = &u->hashing.inner;
        u->client.ops = &u->hashing.ops;
    }
    if (ferry_trainer_init(&info.base, &u->client, source, &u->t) < 0)
        die("init");
}

static double runner_time(runner *u)
{
    double began = now_ms();

    if (ferry_trainer_send_weights(u->t, NULL) < 0)
        die("send");
    return now_ms() - began;
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof(*values), by_value);
    return values[n / 2];
}

static void report(const char *set, const char *way, double *ms, int n,
                   uint64_t bytes, double base_ms, double reference_ms,
                   bool goal)
{
    double mid = median(ms, n), ratio = mid / base_ms;

    if (json) {
        printf("{\"bench\":\"ipc\",\"case\":\"%s, %s\",\"value\":%.3f,"
               "\"unit\":\"x memcpy\",\"limit\":%s,\"ms\":%.2f,"
               "\"min_ms\":%.2f,\"max_ms\":%.2f,\"gb_per_s\":%.2f,"
               "\"peers\":{\"memcpy_ms\":%.2f,\"reference_ms\":%.2f},"
               "\"goal\":%s,\"ok\":%s}\n",
               set, way, ratio, goal ? "1.15" : "null", mid, ms[0], ms[n - 1],
               (double)bytes / mid / 1e6, base_ms, reference_ms,
               goal ? "true" : "false",
               !goal || ratio <= GOAL_RATIO ? "true" : "false");
    } else {
        printf("%-14s %-26s %8.1f ms (%.1f to %.1f)  %6.2f GB/s  %5.2f x "
               "memcpy%s\n",
               set, way, mid, ms[0], ms[n - 1], (double)bytes / mid / 1e6,
               ratio,
               !goal                 ? ""
               : ratio <= GOAL_RATIO ? "  (goal 1.15: met)"
                                     : "  (goal 1.15: missed)");
    }
    fflush(stdout);
}

static void run_one_set(const char *set, const shapes *s, int32_t tp_size,
                        int32_t replicas, bool verify)
{
    int32_t n = tp_size * replicas;
    static double ms[N_MODES + 2][ROUNDS_MAX];
    rig_source *src = rig_source_open(s->params, s->count, RIG_SHARED);
    ferry_source source = rig_source_of(src);
    runner runners[N_MODES];
    copier copiers[RIG_RANKS_MAX];
    uint64_t bytes = s->bytes * (uint64_t)replicas;
    double base, reference;

    rig_source_fill(src, 1);
    copiers_start(copiers, s, rig_source_arena(src), tp_size, n);
    memset(runners, 0, sizeof(runners));
    for (int m = 0; m < N_MODES; m++)
        runner_open(&runners[m], &modes[m], s, tp_size, replicas, &source);
    /* The first round of each maps and faults everything in. */
    for (int k = -1; k < rounds; k++) {
        double *out[N_MODES + 2];
        static double warm[N_MODES + 2];

        for (int m = 0; m < N_MODES + 2; m++)
            out[m] = k < 0 ? &warm[m] : &ms[m][k];
        *out[0] = copiers_time(copiers, n, 'm');
        *out[1] = copiers_time(copiers, n, 's');
        for (int m = 0; m < N_MODES; m++)
            *out[m + 2] = runner_time(&runners[m]);
    }
    base = median(ms[0], rounds);
    reference = median(ms[1], rounds);
    report(set, "memcpy", ms[0], rounds, bytes, base, reference, false);
    report(set, "reference loop", ms[1], rounds, bytes, base, reference, false);
    for (int m = 0; m < N_MODES; m++)
        report(set, modes[m].name, ms[m + 2], rounds, bytes, base, reference,
               m == 1);
    for (int m = 0; m < N_MODES; m++) {
        const char *differs = verify ? rig_differs(runners[m].r, 1) : NULL;

        if (differs) {
            fprintf(stderr, "bench_ipc: %s: %s\n", modes[m].name, differs);
            exit(1);
        }
        ferry_trainer_shutdown(&runners[m].t);
        rig_close(runners[m].r);
    }
    copiers_stop(copiers, n);
    rig_source_close(src);
}

static void run_set(const char *set, const shapes *s, int32_t tp_size,
                    int32_t replicas, bool verify)
{
    if (!only || strstr(set, only))
        run_one_set(set, s, tp_size, replicas, verify);
}

/* The cost of a name: tiny tensors, so that bytes do not count. The first
 * round bakes the plan, later ones replay it. */
static void run_names(size_t n_names, double *first_us, double *later_us)
{
    static const mode way = {"shared, both digests", NULL, HASH_BOTH};
    static double ms[ROUNDS_MAX];
    rig_source *src;
    ferry_source source;
    shapes s = {0};
    runner u;
    char name[64];

    memset(&u, 0, sizeof(u));
    for (size_t i = 0; i < n_names; i++) {
        snprintf(name, sizeof(name), "model.layers.%zu.w%zu.weight", i / 64,
                 i % 64);
        add(&s, name, 8, 4, RIG_ROWS);
    }
    src = rig_source_open(s.params, s.count, RIG_SHARED);
    source = rig_source_of(src);
    rig_source_fill(src, 1);
    runner_open(&u, &way, &s, 1, 1, &source);
    *first_us = runner_time(&u) * 1e3 / (double)n_names;
    for (int k = 0; k < 5; k++)
        ms[k] = runner_time(&u);
    *later_us = median(ms, 5) * 1e3 / (double)n_names;
    if (rig_differs(u.r, 1)) {
        fprintf(stderr, "bench_ipc: names: %s\n", rig_differs(u.r, 1));
        exit(1);
    }
    ferry_trainer_shutdown(&u.t);
    rig_close(u.r);
    rig_source_close(src);
    free_shapes(&s);
}

static void report_names(bool small)
{
    static const size_t counts[] = {272, 3700, 140000};

    for (int i = 0; i < (small ? 2 : 3); i++) {
        double first, later;

        run_names(counts[i], &first, &later);
        if (json)
            printf("{\"bench\":\"ipc\",\"case\":\"%zu names\","
                   "\"value\":%.3f,\"unit\":\"us per name, replay\","
                   "\"limit\":null,\"first_us\":%.3f,\"peers\":{},"
                   "\"goal\":false,\"ok\":true}\n",
                   counts[i], later, first);
        else
            printf("%7zu names: %.2f us a name when baked, %.2f replayed\n",
                   counts[i], first, later);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    bool small = false;
    shapes a, b;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (strcmp(argv[i], "--small") == 0)
            small = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
    }
    if (rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "bench_ipc: rounds must be 1 to %d\n", ROUNDS_MAX);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    a = smol(small ? 2 : 30);
    b = large(small ? 2 : 32);
    run_set("smol 1x1", &a, 1, 1, true);
    run_set("smol 1x3", &a, 3, 1, true);
    run_set("smol 2x1", &a, 1, 2, true);
    run_set(small ? "2 large 1x1" : "1 GiB 1x1", &b, 1, 1, false);
    run_set(small ? "2 large 1x2" : "1 GiB 1x2", &b, 2, 1, false);
    if (!only || strstr("names", only))
        report_names(small);
    free_shapes(&a);
    free_shapes(&b);
    return 0;
}
