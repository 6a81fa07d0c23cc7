/* SPDX-License-Identifier: Apache-2.0 */
/* What the two files of the fetcher share. */
#ifndef FERRY_DEVICE_FETCH_PRIVATE_H
#define FERRY_DEVICE_FETCH_PRIVATE_H

#include "core/copy.h"
#include "device/fetch.h"

/* The next stretch of a contiguous tensor. */
typedef struct ferry__window {
    char *bytes; /* pinned */
    ferry__event *event;
    int64_t first, count; /* elements of the tensor at hand; count 0: none */
} ferry__window;

struct ferry__lane {
    const ferry__memory *memory;
    ferry__queue *queue;
    ferry__event *event;
    ferry__window windows[2];
    bool busy; /* copies were put on the queue and not waited for */
    struct ferry__lane *next; /* of those that were left behind */
    char *staged;             /* with this one */
};

/* Names the tensor at hand in what failed. Returns status. */
ferry_status ferry__fetch_named(const ferry__fetcher *f, ferry_status status);
/* Waits, within the owner's check, until all that is on the queue of the
 * tensor's device is done. */
ferry_status ferry__fetch_drain(const ferry__fetcher *f);

/* ---- fetch_boxes.c ---- */

/* A strided tensor as it comes to the host whole: a box whose destination has
 * the order of the device's memory. */
typedef struct ferry__fetch_hull {
    ferry__copy_op op;
    int64_t low;   /* from element [0,0,…] to the lowest one */
    int64_t numel; /* elements of the memory on the host */
} ferry__fetch_hull;

/* The hull, and the tensor as it will lie on the host; its data is not set. */
void ferry__fetch_lay_out(const ferry_tensor *t, ferry__fetch_hull *out_hull,
                          ferry_tensor *out_view);
/* Copies a box from `src`, where source offset 0 is, to memory of the host or
 * of the same device, and waits for it now and then: what is left is drained
 * by the caller. */
ferry_status ferry__fetch_box(ferry__fetcher *f, const ferry__copy_op *op,
                              void *dst, const void *src, bool to_host);

#endif
