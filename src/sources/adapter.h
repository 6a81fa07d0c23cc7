/* SPDX-License-Identifier: Apache-2.0 */
/* What every adapter of a source shares: it owns the inner source, keeps the
 * metadata of both sides, and reads the inner pass with each item checked.
 * Invariant: `shown` is a function of `seen` alone and is recomputed only
 * when the inner metadata has changed. */
#ifndef FERRY_SOURCES_ADAPTER_H
#define FERRY_SOURCES_ADAPTER_H

#include "core/manifest.h"

#include <ferry/source.h>
#include <stdbool.h>

/* How long an adapter that needs bytes waits for a producer's event. */
#define FERRY__SOURCE_WAIT_MS 60000

#define FERRY__NO_INDEX SIZE_MAX

typedef struct ferry__adapter ferry__adapter;
struct ferry__adapter {
    ferry_source_ops ops; /* this instance's own: flags follow the plan */
    ferry_source inner;   /* owned */
    ferry__manifest seen, shown;
    size_t position; /* items read from the inner pass */
    bool planned, open;

    /* Fills `shown` and the adapter's tables from `seen`. */
    ferry_status (*plan)(ferry__adapter *a);
    /* Frees what plan made, also half made. NULL: nothing. */
    void (*unplan)(ferry__adapter *a);
    /* Gives back what a pass held. NULL: nothing. */
    void (*reset)(ferry__adapter *a);
    /* Frees the adapter's own fields. NULL: nothing. */
    void (*destroy)(ferry__adapter *a);
};

/* Allocates `size_bytes` (an adapter as first member), takes `inner` in and
 * fills the table: all but next is the helper's. FERRY_EINVAL: no source. */
ferry_status ferry__adapter_create(
    size_t size_bytes, const char *kind, const ferry_source *inner,
    ferry_status (*next)(void *self, ferry_item *out), void *out_adapter);
/* Plans once, so that a wrong argument is an error of the constructor, then
 * hands the adapter over and clears *inner. On failure the adapter is gone
 * and the inner source stays the caller's. */
ferry_status ferry__adapter_finish(ferry__adapter *a, ferry_source *inner,
                                   ferry_source *out_source);
/* Frees an adapter but not its inner source. */
void ferry__adapter_abandon(ferry__adapter *a);

/* The next inner item, checked against `seen`, with a name and a lazy
 * tensor's shape that the adapter owns; or FERRY_DONE. */
ferry_status ferry__adapter_pull(ferry__adapter *a, ferry_item *out_item,
                                 size_t *out_index);

/* Whether the inner source can produce its own parameter `index`. */
bool ferry__adapter_inner_holds(ferry__adapter *a, size_t index);

/* A contiguous tensor of a declared shape over `data` (NULL: lazy). */
ferry_status ferry__meta_tensor(const ferry_param_meta *meta, void *data,
                                ferry_tensor *out);

/* Waits, bounded, for an item whose bytes an adapter reads itself. */
ferry_status ferry__item_wait(const ferry_item *item);

/* Memory that is kept from item to item and given back at the end. */
typedef struct ferry__scratch {
    void *data;
    size_t size_bytes;
} ferry__scratch;
ferry_status ferry__scratch_need(ferry__scratch *s, size_t size_bytes);
void ferry__scratch_free(ferry__scratch *s);

/* Methods that a table of another size may lack. */
bool ferry__source_is_stable(const ferry_source *source);
bool (*ferry__source_holds(const ferry_source *source))(void *self,
                                                        const char *name);
/* FERRY_EINVAL when the table lacks a method that is not optional. */
ferry_status ferry__source_check(const char *what, const ferry_source *source);

#endif
