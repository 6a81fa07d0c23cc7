/* SPDX-License-Identifier: Apache-2.0 */
/* A checked pass over a source: B3 for every engine, in one place.
 * What the iteration yields must be what the metadata declared: same names,
 * order, dtypes, shapes, neither missing nor extra.
 * Invariant: after the first divergence no further item comes out. */
#ifndef FERRY_CORE_PASS_H
#define FERRY_CORE_PASS_H

#include "core/spans.h"
#include <ferry/source.h>

typedef struct ferry__pass {
    const ferry_source *source;
    const ferry_param_meta *declared; /* borrowed */
    size_t count;
    int32_t rank;
    bool need_data; /* the sender must hold every parameter (B8) */
    bool devices;   /* who reads the items reads tensors of devices too */
    /* Asked at least every 100 ms while an item's event is awaited. */
    ferry_status (*check)(void *arg, const char *what);
    void *arg;

    size_t index; /* items that came */
    bool open;    /* the source's pass is begun */
    bool done;    /* all came, and the source said so */
    bool over;    /* the source has nothing more to give in this pass */
    double gather_ms;
    ferry__spans *spans; /* takes the times of gathering; NULL: none */
} ferry__pass;

/* Copies the tables, zero-extended from an older size. FERRY_EINVAL names a
 * missing method. `ops` must outlive `out`. */
ferry_status ferry__source_adopt(const ferry_source *source,
                                 ferry_source_ops *ops, ferry_source *out);

ferry_status ferry__pass_begin(ferry__pass *p);
/* An item, or FERRY_DONE once. */
ferry_status ferry__pass_next(ferry__pass *p, ferry_item *out_item);
void ferry__pass_end(ferry__pass *p);

#endif
