/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a checkpoint without a server, for tests/model: loads it on TP ranks
 * (processes over comm/local), takes prompts of ids as one batch, continues
 * them greedily, and prints JSON {logits, tokens, gaps, ms_per_token}.
 * ctest: link=worker
 *
 *   model_driver_main PATH [--tp N] [--kernel f32|bf16|q8_0] [--chunk N]
 *       [--threads N] [--generate N] [--dummy SEED] [--dump DIR]
 *       [--ids 1,2,3]... [--text TEXT]...
 *   model_driver_main PATH --encode TEXT...: ids of each text, as JSON
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "model/model.h"
#include "model/sample.h"
#include "model/tokenizer.h"

#include <errno.h>
#include <ferry/ferry.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SEQS_MAX   32
#define TIMEOUT_MS 60000

typedef struct sequence {
    int32_t *ids; /* prompt, then what was generated */
    int32_t n_prompt, n_ids;
} sequence;

typedef struct options {
    const char *path, *dump;
    int32_t tp, chunk, threads, generate;
    ferry_dtype kernel;
    bool dummy;
    uint64_t seed;
    sequence seqs[SEQS_MAX];
    int32_t n_seqs;
} options;

static void die(ferry_status st, const char *what)
{
    fprintf(stderr, "%s: %s: %s\n", what, ferry_status_name(st),
            ferry_last_error());
    exit(1);
}

static void check(ferry_status st, const char *what)
{
    if (st < 0)
        die(st, what);
}

static sequence *new_sequence(options *o, size_t n)
{
    sequence *s;

    if (o->n_seqs == SEQS_MAX) {
        fprintf(stderr, "more than %d prompts\n", SEQS_MAX);
        exit(2);
    }
    s = &o->seqs[o->n_seqs++];
    s->ids = calloc(n + 4096, sizeof(*s->ids));
    if (!s->ids)
        exit(1);
    return s;
}

static void add_ids(options *o, const char *text)
{
    sequence *s = new_sequence(o, strlen(text));
    char *end;

    for (; *text; text = *end ? end + 1 : end)
        s->ids[s->n_prompt++] = (int32_t)strtol(text, &end, 10);
    s->n_ids = s->n_prompt;
}

static void add_text(options *o, const char *text)
{
    ferry__tokenizer *t = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    sequence *s = new_sequence(o, strlen(text));

    check(ferry__tokenizer_open(o->path, &t), "tokenizer");
    check(ferry__tokenizer_encode(t, text, strlen(text), &ids, &n), "encode");
    memcpy(s->ids, ids, n * sizeof(*ids));
    s->n_prompt = s->n_ids = (int32_t)n;
    ferry_free(ids);
    ferry__tokenizer_close(&t);
}

static int encode_all(const char *path, char **texts, int n)
{
    ferry__tokenizer *t = NULL;
    int i;

    check(ferry__tokenizer_open(path, &t), "tokenizer");
    printf("[");
    for (i = 0; i < n; i++) {
        int32_t *ids = NULL;
        size_t count = 0, j;

        check(ferry__tokenizer_encode(t, texts[i], strlen(texts[i]), &ids,
                                      &count),
              "encode");
        printf("%s[", i ? ", " : "");
        for (j = 0; j < count; j++)
            printf("%s%d", j ? ", " : "", ids[j]);
        printf("]");
        ferry_free(ids);
    }
    printf("]\n");
    ferry__tokenizer_close(&t);
    return 0;
}

static void parse(int argc, char **argv, options *o)
{
    int i;

    *o = (options){.path = argc > 1 ? argv[1] : "",
                   .tp = 1,
                   .threads = 1,
                   .chunk = 1 << 20,
                   .kernel = FERRY_DTYPE_F32};
    for (i = 2; i + 1 < argc; i += 2) {
        const char *flag = argv[i], *value = argv[i + 1];

        if (strcmp(flag, "--tp") == 0)
            o->tp = atoi(value);
        else if (strcmp(flag, "--kernel") == 0)
            check(ferry_dtype_parse(value, &o->kernel), flag);
        else if (strcmp(flag, "--chunk") == 0)
            o->chunk = atoi(value);
        else if (strcmp(flag, "--threads") == 0)
            o->threads = atoi(value);
        else if (strcmp(flag, "--generate") == 0)
            o->generate = atoi(value);
        else if (strcmp(flag, "--dump") == 0)
            o->dump = value;
        else if (strcmp(flag, "--ids") == 0)
            add_ids(o, value);
        else if (strcmp(flag, "--text") == 0)
            add_text(o, value);
        else if (strcmp(flag, "--dummy") == 0) {
            o->dummy = true;
            o->seed = strtoull(value, NULL, 10);
        } else {
            fprintf(stderr, "unknown flag %s\n", flag);
            exit(2);
        }
    }
}

/* ---- loading ---- */

static void load(const options *o, const ferry__model_config *config,
                 ferry__model *model, int32_t rank)
{
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT(NULL);
    ferry_worker *worker = NULL;
    ferry_source source = {0};

    wo.tp_rank = rank;
    wo.tp_size = o->tp;
    if (o->dummy)
        check(ferry__model_dummy_source(config, o->seed, &source), "dummy");
    else
        check(ferry_source_open(o->path, &source), "source");
    check(ferry_worker_create(&wo, ferry__model_table(model), NULL, &worker),
          "worker");
    check(ferry_worker_load_source(worker, &source), "load");
    ferry_worker_destroy(&worker);
    ferry_source_close(&source);
}

static size_t stored_bytes(const ferry_param *p)
{
    size_t n = 1;
    int32_t i;

    for (i = 0; i < p->ndim; i++)
        n *= (size_t)p->shape[i];
    return n / (size_t)ferry_dtype_block(p->dtype) *
           ferry_dtype_bytes(p->dtype);
}

static void dump(const options *o, const ferry_model *table, int32_t rank)
{
    char path[1024];
    size_t i;

    snprintf(path, sizeof(path), "%s/tp%d", o->dump, rank);
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        exit(1);
    for (i = 0; i < table->n_params; i++) {
        const ferry_param *p = &table->params[i];
        FILE *out;

        snprintf(path, sizeof(path), "%s/tp%d/%s", o->dump, rank, p->name);
        out = fopen(path, "wb");
        if (!out || fwrite(p->data, 1, stored_bytes(p), out) != stored_bytes(p))
            exit(1);
        fclose(out);
    }
}

/* ---- running ---- */

/* Feeds tokens [from, to) of every sequence that has them, a chunk at a
 * time; logits of each sequence's last fed token go to its row. */
static void feed(const options *o, const ferry__model_config *c,
                 ferry__model *model, int32_t rank, int32_t *fed, float *logits)
{
    ferry__seq_step steps[SEQS_MAX];
    float *out = rank == 0 ? calloc((size_t)SEQS_MAX,
                                    (size_t)c->vocab_size * sizeof(*out))
                           : NULL;
    int32_t n, i, row[SEQS_MAX];

    for (;;) {
        for (i = 0, n = 0; i < o->n_seqs; i++) {
            int32_t left = o->seqs[i].n_ids - fed[i];

            if (left == 0)
                continue;
            row[n] = i;
            steps[n++] =
                (ferry__seq_step){i, fed[i], left < o->chunk ? left : o->chunk,
                                  o->seqs[i].ids + fed[i]};
        }
        if (n == 0)
            break;
        check(ferry__model_forward(model, steps, n, out, TIMEOUT_MS),
              "forward");
        for (i = 0; i < n; i++) {
            fed[row[i]] += steps[i].n_tokens;
            if (out)
                memcpy(logits + row[i] * c->vocab_size, out + i * c->vocab_size,
                       (size_t)c->vocab_size * sizeof(*out));
        }
    }
    free(out);
}

static void print_logits(const options *o, int64_t vocab, const float *logits)
{
    int32_t i;
    int64_t j;

    printf("{\"logits\": [");
    for (i = 0; i < o->n_seqs; i++) {
        printf("%s[", i ? ", " : "");
        for (j = 0; j < vocab; j++)
            printf("%s%.9g", j ? ", " : "", (double)logits[i * vocab + j]);
        printf("]");
    }
    printf("]");
}

static void print_tokens(const options *o)
{
    int32_t i, j;

    printf(", \"prompts\": [");
    for (i = 0; i < o->n_seqs; i++) {
        printf("%s[", i ? ", " : "");
        for (j = 0; j < o->seqs[i].n_prompt; j++)
            printf("%s%d", j ? ", " : "", o->seqs[i].ids[j]);
        printf("]");
    }
    printf("], \"tokens\": [");
    for (i = 0; i < o->n_seqs; i++) {
        printf("%s[", i ? ", " : "");
        for (j = o->seqs[i].n_prompt; j < o->seqs[i].n_ids; j++)
            printf("%s%d", j > o->seqs[i].n_prompt ? ", " : "",
                   o->seqs[i].ids[j]);
        printf("]");
    }
    printf("]");
}

/* Rank 0 chooses; the others are told the ids. */
static void choose(options *o, const ferry__model_config *c, ferry__comm *comm,
                   int32_t rank, const float *logits)
{
    ferry__sampling greedy = {.top_p = 1};
    int32_t next[SEQS_MAX] = {0}, i;

    for (i = 0; rank == 0 && i < o->n_seqs; i++) {
        ferry__sampled s;

        ferry__sample(logits + i * c->vocab_size, c->vocab_size, &greedy, 0,
                      &s);
        next[i] = s.token;
    }
    if (comm)
        check(comm->ops->broadcast(comm, next, sizeof(next), 0, TIMEOUT_MS),
              "broadcast");
    for (i = 0; i < o->n_seqs; i++)
        o->seqs[i].ids[o->seqs[i].n_ids++] = next[i];
}

static void run(options *o, const ferry__model_config *c, ferry__model *model,
                ferry__comm *comm, int32_t rank)
{
    size_t n = (size_t)o->n_seqs * (size_t)c->vocab_size;
    float *logits = rank == 0 ? calloc(n, sizeof(*logits)) : NULL;
    int32_t fed[SEQS_MAX] = {0}, i;
    int64_t begin;

    feed(o, c, model, rank, fed, logits);
    if (rank == 0)
        print_logits(o, c->vocab_size, logits);
    begin = ferry__now_ns();
    for (i = 0; i < o->generate; i++) {
        choose(o, c, comm, rank, logits);
        if (i + 1 < o->generate)
            feed(o, c, model, rank, fed, logits);
    }
    if (rank == 0) {
        print_tokens(o);
        printf(", \"ms_per_token\": %.3f, \"bytes\": %zu}\n",
               o->generate > 1
                   ? (double)(ferry__now_ns() - begin) / 1e6 / (o->generate - 1)
                   : 0.0,
               ferry__model_bytes(model));
    }
    free(logits);
}

static int run_rank(options *o, const ferry__model_config *c, int fd,
                    int32_t rank)
{
    ferry__model_options mo = {.config = c,
                               .kernel = o->kernel,
                               .tp_rank = rank,
                               .tp_size = o->tp,
                               .max_seqs = o->n_seqs ? o->n_seqs : 1,
                               .max_len = 512,
                               .n_threads = o->threads,
                               .storage_only = o->n_seqs == 0};
    ferry__model *model = NULL;

    if (o->tp > 1)
        check(ferry__comm_local_open(fd, rank, &mo.comm), "comm");
    check(ferry__model_create(&mo, &model), "model");
    load(o, c, model, rank);
    if (o->dump)
        dump(o, ferry__model_table(model), rank);
    if (o->n_seqs > 0)
        run(o, c, model, mo.comm, rank);
    ferry__model_destroy(&model);
    if (mo.comm)
        ferry__comm_close(&mo.comm);
    return 0;
}

int main(int argc, char **argv)
{
    options o;
    ferry__model_config config;
    pid_t pids[64];
    int fd = -1, status, bad = 0, i;

    if (argc > 2 && strcmp(argv[2], "--encode") == 0)
        return encode_all(argv[1], argv + 3, argc - 3);
    parse(argc, argv, &o);
    check(ferry__model_config_open(o.path, &config), "config");
    if (o.tp < 1 || o.tp > 64)
        return 2;
    if (o.tp > 1)
        check(ferry__comm_local_create(o.tp, 0, &fd), "comm");
    for (i = 1; i < o.tp; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            alarm(120);
            exit(run_rank(&o, &config, fd, i));
        }
    }
    alarm(120);
    bad = run_rank(&o, &config, fd, 0);
    for (i = 1; i < o.tp; i++) {
        waitpid(pids[i], &status, 0);
        bad |= status;
    }
    for (i = 0; i < o.n_seqs; i++)
        free(o.seqs[i].ids);
    if (fd >= 0)
        close(fd);
    return bad != 0;
}
