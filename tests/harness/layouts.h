/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of every layout, and the byte that each element then has by index
 * arithmetic alone: read by test_fetch and, on a GPU, by gpu_fetch. */
#ifndef FERRY_TESTS_HARNESS_LAYOUTS_H
#define FERRY_TESTS_HARNESS_LAYOUTS_H

#include <ferry/tensor.h>

typedef struct layout {
    const char *label;
    ferry_dtype dtype;
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS], stride[FERRY_MAX_DIMS], offset;
    int64_t elements; /* of the memory */
} layout;

/* Byte i of the memory. */
static inline unsigned char byte_of(int64_t i)
{
    return (unsigned char)((uint64_t)(i * 2654435761 + 12345) >> 13);
}

/* Byte b of element k of the logical order. */
static inline unsigned char expected(const layout *l, int64_t k, int64_t b)
{
    int64_t at = l->offset;

    for (int32_t d = l->ndim - 1; d >= 0; d--) {
        at += k % l->shape[d] * l->stride[d];
        k /= l->shape[d];
    }
    return byte_of(at * (int64_t)ferry_dtype_bytes(l->dtype) + b);
}

#define BF16 FERRY_DTYPE_BF16
#define F32  FERRY_DTYPE_F32
#define U8   FERRY_DTYPE_U8

static const layout layouts[] = {
    {"scalar", F32, 0, {0}, {0}, 0, 1},
    {"scalar behind others", F32, 0, {0}, {0}, 7, 9},
    {"one dimension", BF16, 1, {1000}, {1}, 3, 1003},
    {"contiguous", F32, 2, {13, 17}, {17, 1}, 0, 221},
    {"extents of one", F32, 3, {1, 9, 1}, {77, 1, 33}, 0, 9},
    {"transposed", BF16, 2, {40, 60}, {1, 40}, 0, 2400},
    {"permuted", F32, 3, {5, 6, 7}, {7, 35, 1}, 0, 210},
    {"rows apart", BF16, 2, {50, 700}, {900, 1}, 11, 45011},
    {"short rows apart", BF16, 2, {50, 7}, {9, 1}, 0, 450},
    {"short rows far apart", BF16, 2, {50, 3}, {900, 1}, 0, 45000},
    {"a column", F32, 1, {50}, {900}, 4, 45004},
    {"every second", BF16, 1, {500}, {2}, 1, 1001},
    {"every second of both", BF16, 2, {20, 30}, {120, 2}, 0, 2400},
    {"transposed rows apart", BF16, 2, {30, 600}, {1, 50}, 5, 30005},
    {"spread", F32, 2, {40, 30}, {0, 1}, 0, 30},
    {"spread the other way", F32, 2, {40, 30}, {1, 0}, 0, 40},
    {"spread all over", F32, 2, {40, 30}, {0, 0}, 2, 3},
    {"backwards", BF16, 1, {100}, {-1}, 99, 100},
    {"rows backwards", BF16, 2, {20, 400}, {-500, 1}, 9500, 10000},
    {"both backwards", F32, 2, {6, 5}, {-10, -2}, 58, 60},
    {"every dimension that there is",
     F32,
     8,
     {2, 2, 2, 2, 2, 2, 2, 2},
     {2048, 1024, 512, 256, 128, 64, 32, 16},
     0,
     4081},
    {"windows that overlap", F32, 2, {50, 20}, {3, 1}, 0, 167},
    {"four dimensions", U8, 4, {3, 4, 5, 6}, {400, 6, 24, 1}, 0, 1200},
};
#define N_LAYOUTS (sizeof(layouts) / sizeof(layouts[0]))

/* More than the windows of a device hold. */
static const layout large_layouts[] = {
    {"large", F32, 2, {3000, 1000}, {1000, 1}, 1, 3000001},
    {"large, transposed", BF16, 2, {1500, 2000}, {1, 1500}, 0, 3000000},
    {"large rows apart", BF16, 2, {3, 9000000}, {9000008, 1}, 0, 27000024},
};

#endif
