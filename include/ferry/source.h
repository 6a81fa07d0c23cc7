/* SPDX-License-Identifier: Apache-2.0 */
/* WeightSource: what goes out.
 * Two channels, the metadata and the iteration, which agree element by
 * element: same names, order, dtypes, shapes (B3). Everything an engine gets
 * from a source has Hugging Face names and full, unsharded shapes (A3). */
#ifndef FERRY_SOURCE_H
#define FERRY_SOURCE_H

#include <ferry/tensor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One declared parameter: its name, wire dtype and full shape. */
typedef struct ferry_param_meta {
    const char *name; /* Hugging Face (checkpoint) name, unique, not empty */
    ferry_dtype dtype;
    int32_t ndim;
    int64_t shape[FERRY_MAX_DIMS];
} ferry_param_meta;

/* One item of an iteration. */
typedef struct ferry_item {
    const char *name;    /* borrowed until the next call of next or end */
    ferry_tensor tensor; /* any strides; data == NULL: this rank does not
                            hold the parameter (see holds) */
    /* Completion event: NULL when the bytes are there already. Otherwise it
     * is called before the first byte is read, may block up to timeout_ms,
     * and answers FERRY_OK, FERRY_ETIMEOUT or the producer's own failure.
     * A tensor of a device is read on a stream of the library's own, which
     * waits for no other: what still writes it needs an event here. */
    ferry_status (*wait)(void *arg, int64_t timeout_ms);
    void *wait_arg;
} ferry_item;

/* Tensors stay valid and unchanged from next until end, not only until the
 * next call of next. Lets a backend publish a whole pass at once. */
#define FERRY_SOURCE_STABLE 0x1u
/* next is a collective of the trainer's ranks. A pass that fails is then
 * driven to its end all the same, before the error is given, so that no other
 * rank is left waiting in it (B4). */
#define FERRY_SOURCE_COLLECTIVE 0x2u

/* What a source implements. `size` is sizeof(ferry_source_ops) as the
 * implementer compiled it. One thread calls at a time. */
typedef struct ferry_source_ops {
    size_t size;
    const char *kind;  /* "module", "safetensors", …: for logs */
    uint32_t flags;    /* FERRY_SOURCE_… */
    uint32_t reserved; /* 0 */

    /* The ordered list; moves no data. It may be a collective and dear the
     * first time, so the source caches it. Borrowed until the next call of
     * metadata or close. Engines call it anew each round on every rank. */
    ferry_status (*metadata)(void *self, const ferry_param_meta **out_params,
                             size_t *out_count);
    /* Starts a fresh pass. Any number of passes, one at a time. */
    ferry_status (*begin)(void *self);
    /* Yields the next item, or FERRY_DONE. The item is borrowed until the
     * next call (see FERRY_SOURCE_STABLE). May be a collective. */
    ferry_status (*next)(void *self, ferry_item *out_item);
    /* Ends the pass, also a pass that was not driven to its end. */
    void (*end)(void *self);
    /* Frees the source. NULL: nothing to free. */
    void (*close)(void *self);

    /* Optional (NULL: yes to all): can this rank produce `name`? (B8) */
    bool (*holds)(void *self, const char *name);
    /* Optional (NULL: layerwise groups): the gather groups, as the number of
     * consecutive metadata entries in each (B9, B10). Borrowed like
     * metadata. */
    ferry_status (*groups)(void *self, const size_t **out_lengths,
                           size_t *out_count);
} ferry_source_ops;

/* A source is a table and the implementer's own pointer. Plain data. */
typedef struct ferry_source {
    const ferry_source_ops *ops;
    void *self;
} ferry_source;

/* Calls close if there is one and clears *source. Accepts NULL and a cleared
 * source. */
void ferry_source_close(ferry_source *source);

/* ---- ready sources ---- */

/* A C trainer's own tensors. `names` and `tensors` are copied (not the
 * bytes): the memory stays the caller's and must outlive the source. Strided
 * tensors are fine, and those of a device whose bytes are there when a pass
 * begins. Two entries that name the same storage are both sent;
 * pass one of them to state a tied parameter once (B5). Stable.
 * FERRY_EEXIST: a name twice; FERRY_EINVAL: an empty or NULL name or data. */
ferry_status ferry_source_module(const char *const *names,
                                 const ferry_tensor *tensors, size_t count,
                                 ferry_source *out_source);

/* A safetensors file, a `*.safetensors.index.json`, or a folder that holds
 * either. Memory-mapped and read-only; names in file order, files in name
 * order. Stable, unless the data of a file is not aligned for its dtypes. A
 * name that the index does not put where it lies is left out, with a warning
 * in the log. FERRY_EIO names the file; FERRY_EINVAL names the file and what
 * is malformed in it. */
ferry_status ferry_source_safetensors(const char *path,
                                      ferry_source *out_source);

/* A GGUF file: dequantised to f32, Hugging Face names and layout restored
 * (the q/k row permutation undone). Opened through the module
 * ferry_source_gguf; FERRY_EBACKEND says why if it cannot be loaded. */
ferry_status ferry_source_gguf(const char *path, ferry_source *out_source);

/* safetensors or GGUF, by what `path` is. */
ferry_status ferry_source_open(const char *path, ferry_source *out_source);

/* ---- adapters: each wraps `inner` and owns it on success (inner is then
 * cleared; out_source may be the same variable); on failure inner stays the
 * caller's. They compose. Each reads the inner metadata once when it is made,
 * so where that is a collective all ranks make their adapters together. Fuse
 * and dequantise read bytes within next and wait for an item's event there,
 * at most a minute. Cast, fuse and dequantise read tensors of the host and
 * refuse others by name; the rest passes on what comes. ---- */

/* Renames: in each name the first matching pair's `from` is replaced by its
 * `to`. A pattern is a plain prefix ("model.language_model.") or, with one
 * '*' on both sides, a whole-name template ("blk.*.q" -> "layers.*.q").
 * FERRY_EEXIST: two parameters end under one name, naming all three. */
ferry_status ferry_source_rename(ferry_source *inner, const char *const *from,
                                 const char *const *to, size_t count,
                                 ferry_source *out_source);

/* Casts floating-point parameters of dtype other than `to` (round to nearest
 * even). `only`: name pattern as in rename ('*' matches anything), NULL for
 * all; other parameters pass unchanged. */
ferry_status ferry_source_cast(ferry_source *inner, ferry_dtype to,
                               const char *only, ferry_source *out_source);

/* Keeps the names that match a pattern (as in rename: a prefix, or a whole
 * name with one '*'; keep != 0) or drops them (keep == 0). FERRY_EUNKNOWN
 * when a pattern matches nothing. */
ferry_status ferry_source_filter(ferry_source *inner,
                                 const char *const *patterns, size_t count,
                                 int keep, ferry_source *out_source);

/* Orders the pass so that each layer's names are contiguous, layers by index
 * (B9). Needs a stable inner source: FERRY_ENOTSUP otherwise. */
ferry_status ferry_source_reorder(ferry_source *inner,
                                  ferry_source *out_source);

/* Splits parameter `name` along `dim` into consecutive parts named
 * part_names[i] with sizes[i] rows; the sizes must add up. `name` may hold
 * one '*', which each part name then repeats. */
ferry_status ferry_source_split(ferry_source *inner, const char *name,
                                int32_t dim, const char *const *part_names,
                                const int64_t *sizes, size_t count,
                                ferry_source *out_source);

/* Fuses the parts (consecutive or not; '*' as in split) along `dim` into one
 * parameter, which stands where the last part stood. Its memory is counted:
 * at most one fused parameter at a time is held per open template. */
ferry_status ferry_source_fuse(ferry_source *inner, const char *name,
                               int32_t dim, const char *const *part_names,
                               size_t count, ferry_source *out_source);

/* Dequantises weight × scale pairs: each parameter `w` that has a companion
 * `w` + suffix (for example "_scale_inv", 2-D block scales that divide its
 * shape into equal blocks, or 0-d/1-element per-tensor scales) is multiplied
 * and yields dtype `to`; the companion disappears. Weight and scale may come
 * in either order; the first is held until the other arrives. */
ferry_status ferry_source_dequantise(ferry_source *inner, const char *suffix,
                                     ferry_dtype to, ferry_source *out_source);

#ifdef __cplusplus
}
#endif
#endif
