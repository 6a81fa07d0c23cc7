/* SPDX-License-Identifier: Apache-2.0 */
/* Element types and strided views.
 * A tensor is a view {base, dtype, offset, shape, stride}; a lazy tensor is
 * the same view with a parameter's name in place of the base pointer. Every
 * operation here composes views and never moves a byte. */
#ifndef FERRY_TENSOR_H
#define FERRY_TENSOR_H

#include <ferry/status.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, text, block_elems, block_bytes). Values are pinned. The
 * text is torch's name. A block type (q8_0) stores `block_elems` consecutive
 * elements of the last dimension in `block_bytes`; it is a storage type of
 * workers and never travels. */
#define FERRY_DTYPE_TABLE(X)                                                   \
    X(F64, 1, "float64", 1, 8)                                                 \
    X(F32, 2, "float32", 1, 4)                                                 \
    X(F16, 3, "float16", 1, 2)                                                 \
    X(BF16, 4, "bfloat16", 1, 2)                                               \
    X(F8_E4M3, 5, "float8_e4m3fn", 1, 1)                                       \
    X(F8_E5M2, 6, "float8_e5m2", 1, 1)                                         \
    X(I64, 7, "int64", 1, 8)                                                   \
    X(I32, 8, "int32", 1, 4)                                                   \
    X(I16, 9, "int16", 1, 2)                                                   \
    X(I8, 10, "int8", 1, 1)                                                    \
    X(U64, 11, "uint64", 1, 8)                                                 \
    X(U32, 12, "uint32", 1, 4)                                                 \
    X(U16, 13, "uint16", 1, 2)                                                 \
    X(U8, 14, "uint8", 1, 1)                                                   \
    X(BOOL, 15, "bool", 1, 1)                                                  \
    X(Q8_0, 32, "q8_0", 32, 34)

typedef enum ferry_dtype {
    FERRY_DTYPE_NONE = 0,
#define FERRY_DTYPE_ENUM(name, value, text, elems, bytes)                      \
    FERRY_DTYPE_##name = (value),
    FERRY_DTYPE_TABLE(FERRY_DTYPE_ENUM)
#undef FERRY_DTYPE_ENUM
} ferry_dtype;

/* torch's name ("bfloat16"), or "none" for an unknown value. */
const char *ferry_dtype_name(ferry_dtype dtype);

/* Reads a name: torch's names, with or without "torch.", any case, and the
 * aliases f64 f32 f16 bf16 double float half fp8_e4m3 fp8_e5m2 long int
 * short. FERRY_EUNKNOWN lists the known names. */
ferry_status ferry_dtype_parse(const char *name, ferry_dtype *out_dtype);

/* Bytes of one element, or of one block of a block type. 0 if unknown. */
size_t ferry_dtype_bytes(ferry_dtype dtype);

/* Elements in one block: 1 for plain types. 0 if unknown. */
int64_t ferry_dtype_block(ferry_dtype dtype);

#define FERRY_MAX_DIMS 8

/* A view of a parameter. Plain data: copy it freely; it owns nothing. */
typedef struct ferry_tensor {
    void *data;        /* first byte of the storage; NULL when lazy */
    const char *name;  /* parameter, when lazy; may be NULL otherwise */
    ferry_dtype dtype; /* a block type only in a loader's destinations */
    int32_t ndim;      /* 0..FERRY_MAX_DIMS; 0 is a scalar, one element */
    int64_t offset;    /* elements from `data` to element [0,0,…] */
    int64_t shape[FERRY_MAX_DIMS];  /* elements per dimension, >= 0 */
    int64_t stride[FERRY_MAX_DIMS]; /* elements; any sign; 0 is legal in a
                                       source, never in a destination */
    int32_t device;                 /* 0: host memory; 1 + n: memory of CUDA
                                       device n, in the tensors of a source
                                       alone */
    int32_t slot;                   /* index of a stored parameter, set by
                           ferry_loader_slot; 0 elsewhere */
} ferry_tensor;

/* A contiguous row-major tensor over `data` (NULL makes no memory access
 * legal, but views may be taken). FERRY_EINVAL: ndim or a dimension out of
 * range; FERRY_EOVERFLOW: the byte size does not fit. */
ferry_status ferry_tensor_init(ferry_tensor *out, void *data, ferry_dtype dtype,
                               int32_t ndim, const int64_t *shape);

/* Number of elements; 1 for a scalar. Never overflows for a valid tensor. */
int64_t ferry_tensor_numel(const ferry_tensor *t);
/* numel × element size. */
size_t ferry_tensor_bytes(const ferry_tensor *t);
/* Row-major without gaps (dimensions of extent 1 may have any stride). */
bool ferry_tensor_is_contiguous(const ferry_tensor *t);
/* Address of element [0,0,…]; NULL when lazy. */
void *ferry_tensor_data(const ferry_tensor *t);

/* The view algebra. `dim` may be negative (counts from the end). `out` may
 * be `t` itself. FERRY_EINVAL names the operation, the parameter if lazy,
 * and both values. Each also works on lazy tensors. */
ferry_status ferry_tensor_narrow(const ferry_tensor *t, int32_t dim,
                                 int64_t start, int64_t length,
                                 ferry_tensor *out);
ferry_status ferry_tensor_select(const ferry_tensor *t, int32_t dim,
                                 int64_t index, ferry_tensor *out);
ferry_status ferry_tensor_transpose(const ferry_tensor *t, int32_t dim0,
                                    int32_t dim1, ferry_tensor *out);
ferry_status ferry_tensor_permute(const ferry_tensor *t, const int32_t *dims,
                                  ferry_tensor *out);
/* Chunk `index` of `chunks` as torch.chunk cuts: ceil(n / chunks) each, the
 * last ones shorter or empty. */
ferry_status ferry_tensor_chunk(const ferry_tensor *t, int64_t chunks,
                                int32_t dim, int64_t index, ferry_tensor *out);
/* A reshape that needs no copy; one dimension may be -1. FERRY_ENOTSUP when
 * the strides would need a copy. */
ferry_status ferry_tensor_view(const ferry_tensor *t, int32_t ndim,
                               const int64_t *shape, ferry_tensor *out);
/* Merges dimensions first..last; same rule as ferry_tensor_view. */
ferry_status ferry_tensor_flatten(const ferry_tensor *t, int32_t first,
                                  int32_t last, ferry_tensor *out);
ferry_status ferry_tensor_unsqueeze(const ferry_tensor *t, int32_t dim,
                                    ferry_tensor *out);
ferry_status ferry_tensor_squeeze(const ferry_tensor *t, int32_t dim,
                                  ferry_tensor *out);

/* Copies src into dst element by element, converting where the dtypes
 * differ: float to float rounds to nearest even; f32/bf16/f16 sources may
 * also be stored as FERRY_DTYPE_Q8_0 through the loader only. Shapes must be
 * equal. The two must not overlap. Integer <-> float is refused with
 * FERRY_ENOTSUP, and so is memory of a device. */
ferry_status ferry_tensor_copy(const ferry_tensor *dst,
                               const ferry_tensor *src);

/* Memory that the inference workers of this host can read in place: tensors
 * that live in it travel through the `ipc` backend with one copy in all.
 * Page aligned and zeroed; reserved at once, so that a full system is
 * FERRY_ENOSPC here and no signal later. Free it with ferry_shared_free
 * after the engines that sent from it are shut down. Any thread. */
ferry_status ferry_shared_alloc(size_t size_bytes, void **out_memory);
void ferry_shared_free(void *memory); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
