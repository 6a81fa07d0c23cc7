/* SPDX-License-Identifier: Apache-2.0 */
/* `ipc_handles_pickled`: torch's CUDA IPC tuples as Python pickles them,
 * base64-coded. Two steps: opcodes to values, values to handles.
 * Invariant: nothing that a pickle names is looked up, imported or called; an
 * opcode or a name that those tuples do not need ends the reading. */
#ifndef FERRY_BACKENDS_IPC_WIRE_PICKLE_H
#define FERRY_BACKENDS_IPC_WIRE_PICKLE_H

#include <ferry/backend.h>

/* Of the decoded pickle; a handle takes about half a KiB. */
#define FERRY__PICKLE_MAX ((size_t)16 << 20)

/* ---- opcodes to values ---- */

typedef enum ferry__pickle_kind {
    FERRY__PICKLE_MARK = 1, /* only while reading */
    FERRY__PICKLE_INT,
    FERRY__PICKLE_BOOL,
    FERRY__PICKLE_TEXT,
    FERRY__PICKLE_BYTES,
    FERRY__PICKLE_GLOBAL, /* items: module and name, both texts */
    FERRY__PICKLE_TUPLE,
    FERRY__PICKLE_SIZE, /* torch.Size, of its one tuple */
    FERRY__PICKLE_DICT, /* items: key, value, key, value, … */
    FERRY__PICKLE_LIST
} ferry__pickle_kind;

typedef struct ferry__pickle_value {
    ferry__pickle_kind kind;
    int64_t number; /* int, bool */
    size_t at;      /* offset of its opcode, for errors */
    /* Text and bytes: in the pickle. Others: indexes of values. */
    const unsigned char *bytes;
    uint32_t *items; /* owned */
    size_t size, capacity;
} ferry__pickle_value;

typedef struct ferry__pickle {
    ferry__pickle_value *values; /* owned */
    size_t n_values, capacity;
    uint32_t top; /* the whole */
} ferry__pickle;

/* Reads a whole pickle of protocol 4 or 5; texts stay in `bytes`.
 * FERRY_EINVAL names the opcode and its offset. */
ferry_status ferry__pickle_read(const void *bytes, size_t size_bytes,
                                ferry__pickle *out);
void ferry__pickle_free(ferry__pickle *p);

/* ---- values to handles ---- */

typedef struct ferry__cuda_bytes {
    const unsigned char *data;
    size_t size;
} ferry__cuda_bytes;

/* The arguments of torch's rebuild_cuda_tensor. */
typedef struct ferry__cuda_handle {
    ferry__cuda_bytes key; /* names the device; compared whole */
    bool is_parameter, typed_storage;
    ferry_dtype dtype;
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS], stride[FERRY_MAX_DIMS];
    int64_t offset; /* elements */
    int64_t device; /* the sender's index; a receiver has its own */
    ferry__cuda_bytes handle, ref_counter, event;
    int64_t storage_bytes, storage_offset, ref_counter_offset;
    bool requires_grad, event_sync_required;
} ferry__cuda_handle;

/* An entry a parameter, or one for a packed chunk; each has a handle a
 * device. */
typedef struct ferry__cuda_handles {
    bool packed;
    size_t n_entries;
    size_t *first;             /* n_entries + 1 indexes into items; owned */
    ferry__cuda_handle *items; /* owned; they point into `pickle` */
    unsigned char *pickle;     /* owned */
} ferry__cuda_handles;

/* Standard base64 with padding, then as ferry__cuda_handles_read. */
ferry_status ferry__cuda_handles_decode(const char *text, size_t length,
                                        ferry__cuda_handles *out);
/* Takes `pickle` over on success. FERRY_EINVAL says what is there instead of
 * a handle, and where. */
ferry_status ferry__cuda_handles_read(unsigned char *pickle, size_t size_bytes,
                                      ferry__cuda_handles *out);
void ferry__cuda_handles_free(ferry__cuda_handles *h);

/* The handle of an entry for the device that `key` names. FERRY_EMISMATCH
 * lists that key and those that are there (O-48). */
ferry_status ferry__cuda_handles_find(const ferry__cuda_handles *h,
                                      size_t entry, const char *key,
                                      const ferry__cuda_handle **out);

#endif
