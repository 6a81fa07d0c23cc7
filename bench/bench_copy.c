/* SPDX-License-Identifier: Apache-2.0 */
/* The copy loops against plain memcpy of the same bytes, and q8_0 against
 * ggml's own quantiser over the same rows. Runs are interleaved, the median
 * counts. Prints text, or with --json one JSON object a line:
 * {bench,case,value,unit,limit,peers,goal,ok}. ctest: link=worker
 * Invariant: every case moves the same 256 MiB source, tensor by tensor. */
#include "base/clock.h"
#include "core/copy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define TOTAL  ((size_t)256 << 20)
#define TENSOR ((size_t)2 << 20) /* bytes of one, as in a small model */
#define ROW    1536              /* elements of a row for q8_0 */
#define RUNS   9

/* ggml declares it in a header that it does not install. */
void quantize_row_q8_0(const float *x, void *y, int64_t k);

typedef struct memory {
    char *src, *dst;
    ferry__xxh3_state *digest;
} memory;

typedef void (*case_fn)(const memory *m);

static void run_memcpy(const memory *m)
{
    for (size_t at = 0; at < TOTAL; at += TENSOR)
        memcpy(m->dst + at, m->src + at, TENSOR);
}

static void run_op(const memory *m, ferry__copy_op *op, size_t dst_bytes,
                   ferry__xxh3_state *digest)
{
    for (size_t at = 0; at < TOTAL / TENSOR; at++)
        ferry__copy_run(op, m->dst + at * dst_bytes, m->src + at * TENSOR,
                        digest);
}

static ferry__copy_op flat(ferry_dtype from, ferry_dtype to)
{
    ferry__copy_op op = {.ndim = 1,
                         .shape = {(int64_t)(TENSOR / ferry_dtype_bytes(from))},
                         .src_stride = {1},
                         .dst_stride = {1},
                         .src_dtype = from,
                         .dst_dtype = to};
    return op;
}

static void run_copy(const memory *m)
{
    ferry__copy_op op = flat(FERRY_DTYPE_BF16, FERRY_DTYPE_BF16);
    run_op(m, &op, TENSOR, NULL);
}

static void run_digest(const memory *m)
{
    ferry__copy_op op = flat(FERRY_DTYPE_BF16, FERRY_DTYPE_BF16);
    run_op(m, &op, TENSOR, m->digest);
}

/* Half of each row of 2048 elements, as a column cut takes it. */
static void run_columns(const memory *m)
{
    ferry__copy_op op = {.ndim = 2,
                         .shape = {(int64_t)(TENSOR / 4096), 1024},
                         .src_stride = {2048, 1},
                         .dst_stride = {1024, 1},
                         .src_dtype = FERRY_DTYPE_BF16,
                         .dst_dtype = FERRY_DTYPE_BF16};
    run_op(m, &op, TENSOR / 2, m->digest);
}

static void run_widen(const memory *m)
{
    ferry__copy_op op = flat(FERRY_DTYPE_BF16, FERRY_DTYPE_F32);
    run_op(m, &op, TENSOR * 2, m->digest);
}

/* ---- into slots that go round, as a sender packs ---- */

#define RING (2 * TENSOR)

static void run_ring_memcpy(const memory *m)
{
    for (size_t at = 0; at < TOTAL; at += TENSOR)
        memcpy(m->dst + at % RING, m->src + at, TENSOR);
}

static void run_ring_digest(const memory *m)
{
    ferry__copy_op op = flat(FERRY_DTYPE_BF16, FERRY_DTYPE_BF16);
    for (size_t at = 0; at < TOTAL; at += TENSOR)
        ferry__copy_hot(&op, m->dst + at % RING, m->src + at, m->digest);
}

/* ---- q8_0, over f32 rows ---- */

static void run_ggml(const memory *m)
{
    const float *rows = (const float *)(const void *)m->src;
    for (size_t r = 0; r < TOTAL / 4 / ROW; r++)
        quantize_row_q8_0(rows + r * ROW, m->dst + r * (ROW / 32 * 34), ROW);
}

static void run_q8_0(const memory *m)
{
    for (size_t r = 0; r < TOTAL / 4 / ROW; r++)
        ferry__convert(m->dst + r * (ROW / 32 * 34), FERRY_DTYPE_Q8_0,
                       m->src + r * ROW * 4, FERRY_DTYPE_F32, ROW);
}

typedef struct bench_case {
    const char *name;
    case_fn run;
    size_t base; /* index of the case it is compared with */
    double goal; /* times the base; 0: a figure only */
} bench_case;

static const bench_case cases[] = {
    {"memcpy", run_memcpy, 0, 0},
    {"bf16 to bf16", run_copy, 0, 0},
    {"bf16 to bf16, digest", run_digest, 0, 1.15},
    {"half columns, digest", run_columns, 0, 0},
    {"bf16 to f32, digest", run_widen, 0, 0},
    {"ggml quantize_row_q8_0", run_ggml, 5, 0},
    {"f32 to q8_0", run_q8_0, 5, 1.5},
    {"memcpy to a ring", run_ring_memcpy, 7, 0},
    {"bf16 to a ring, digest", run_ring_digest, 7, 1.15},
};
#define N_CASES (sizeof(cases) / sizeof(cases[0]))

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool report(bool json, const bench_case *c, const double *sorted,
                   double base_ms)
{
    double ms = sorted[RUNS / 2], ratio = ms / base_ms;
    bool ok = c->goal <= 0 || ratio <= c->goal;
    char goal[32] = "null";
    if (c->goal > 0)
        snprintf(goal, sizeof(goal), "%.3g", c->goal);
    if (json)
        printf("{\"bench\":\"copy\",\"case\":\"%s\",\"value\":%.4g,"
               "\"unit\":\"x\",\"limit\":null,\"peers\":{\"%s\":1,"
               "\"ms\":%.4g,\"ms_min\":%.4g,\"ms_max\":%.4g},\"goal\":%s,"
               "\"ok\":%s}\n",
               c->name, ratio, cases[c->base].name, ms, sorted[0],
               sorted[RUNS - 1], goal, ok ? "true" : "false");
    else
        printf("copy %-24s %7.1f ms (%.1f to %.1f)  %5.2f x %s%s\n", c->name,
               ms, sorted[0], sorted[RUNS - 1], ratio, cases[c->base].name,
               ok ? "" : "  (goal missed)");
    return ok;
}

/* Values as weights have them: signs and mantissas random, small. */
static void fill(char *bytes)
{
    uint32_t state = 1;
    for (size_t i = 0; i < TOTAL / 4; i++) {
        state = state * 1664525u + 1013904223u;
        uint32_t bits = (state & 0x807fffffu) | 0x3c000000u;
        memcpy(bytes + i * 4, &bits, 4);
    }
}

int main(int argc, char **argv)
{
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0, good = true;
    static double ms[N_CASES][RUNS];
    memory m = {NULL, NULL, ferry__xxh3_create()};
    m.src = mmap(NULL, TOTAL, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    m.dst = mmap(NULL, TOTAL * 2, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!m.digest || m.src == MAP_FAILED || m.dst == MAP_FAILED)
        return 1;
    fill(m.src);
    memset(m.dst, 1, TOTAL * 2);
    for (int r = 0; r < RUNS; r++) {
        for (size_t k = 0; k < N_CASES; k++) {
            int64_t t0 = ferry__now_ns();
            cases[k].run(&m);
            ms[k][r] = (double)(ferry__now_ns() - t0) / 1e6;
        }
    }
    for (size_t k = 0; k < N_CASES; k++)
        qsort(ms[k], RUNS, sizeof(double), by_value);
    for (size_t k = 0; k < N_CASES; k++)
        good &= report(json, &cases[k], ms[k], ms[cases[k].base][RUNS / 2]);
    ferry__xxh3_destroy(m.digest);
    munmap(m.src, TOTAL);
    munmap(m.dst, TOTAL * 2);
    return good ? 0 : 2;
}
