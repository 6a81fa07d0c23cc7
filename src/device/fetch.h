/* SPDX-License-Identifier: Apache-2.0 */
/* Reading tensors wherever they lie: stretches of a tensor's logical order,
 * packed, to the host or to memory of the tensor's own device. Tensors of the
 * host are read in place.
 * A contiguous tensor of a device comes through two pinned windows, the next
 * one on its way while the last is used; a strided one comes to the host
 * whole, in the order of its memory, and is put in order there.
 * Invariant: what a function gave is there when it returns, and after rest no
 * copy is under way, so the tensors may go. */
#ifndef FERRY_DEVICE_FETCH_H
#define FERRY_DEVICE_FETCH_H

#include "device/memory.h"

typedef struct ferry__lane ferry__lane; /* what is kept of one device */

/* Of one thread at a time. Zeroed, with the owner's check set, it is open. */
typedef struct ferry__fetcher {
    /* Asked at least every 100 ms while a copy runs; a failure ends the call.
     * NULL: nobody. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    uint64_t peak_bytes; /* of the host, held at most since the last rest */

    ferry__lane *lanes[FERRY__DEVICES_MOST];
    uint64_t held_bytes;
    /* the tensor at hand */
    const char *name;
    ferry_tensor tensor, view;
    ferry__lane *lane; /* NULL: of the host */
    bool is_staged;    /* view is the whole tensor on the host */
    char *staged;
    size_t staged_bytes;
} ferry__fetcher;

/* Takes up a tensor, which must stay as it is until the next one is taken up
 * or rest. Borrows the name, for errors. FERRY_EBACKEND: there is no such
 * device, or no driver. */
ferry_status ferry__fetch_begin(ferry__fetcher *f, const char *name,
                                const ferry_tensor *tensor);
/* Packs elements [first, first + count) of `view`, a tensor of the host, at
 * out. */
typedef void (*ferry__fetch_sink)(void *arg, const ferry_tensor *view,
                                  int64_t first, int64_t count, void *out);
/* Has the sink pack elements [first, first + count) at out, in one call or
 * several in rising order. Best asked in rising order. */
ferry_status ferry__fetch_pack(ferry__fetcher *f, int64_t first, int64_t count,
                               void *out, ferry__fetch_sink sink, void *arg);
/* Whether ferry__fetch_copy to this memory is better than a way through the
 * host. */
bool ferry__fetch_copies(const ferry__fetcher *f, const ferry__memory *memory);
/* Packs elements [first, first + count) in memory of the tensor's device. */
ferry_status ferry__fetch_copy(ferry__fetcher *f, int64_t first, int64_t count,
                               void *out);
/* Lets go of the tensor and of what was staged; a device that does not come
 * to an end is waited for a third of a second and its memory left to it. */
void ferry__fetch_rest(ferry__fetcher *f);
/* Rest, and gives all back. The fetcher is as new. */
void ferry__fetch_close(ferry__fetcher *f);

#endif
