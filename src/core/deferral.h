/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions that run on threads of their own (E5): a bounded queue of
 * packed pieces, each with where it goes. Jobs of one drain may run in any
 * order. Invariant: memory is what was lent, and no wait here depends on
 * anything but the threads' own work. */
#ifndef FERRY_CORE_DEFERRAL_H
#define FERRY_CORE_DEFERRAL_H

#include "core/copy.h"
#include "core/spans.h"

#define FERRY__DEFERRAL_PIECE ((size_t)2 << 20)
#define FERRY__DEFERRAL_MAX   64

typedef struct ferry__deferral ferry__deferral;

/* `spans` takes the time that conversions took; it must outlive this. */
ferry_status ferry__deferral_create(int32_t n_threads, ferry__spans *spans,
                                    ferry__deferral **out);
/* Discards what is queued, joins the threads. */
void ferry__deferral_destroy(ferry__deferral **deferral);
/* How much memory to lend. */
size_t ferry__deferral_bytes(const ferry__deferral *d);
/* Starts the threads if they do not run; the memory is lent until the next
 * ferry__deferral_discard. */
ferry_status ferry__deferral_lend(ferry__deferral *d, void *memory);
/* A buffer of FERRY__DEFERRAL_PIECE bytes; waits until one is free. */
void *ferry__deferral_acquire(ferry__deferral *d);
/* Queues ferry__copy_run(op, dst, buffer, NULL). */
void ferry__deferral_submit(ferry__deferral *d, const ferry__copy_op *op,
                            void *dst, void *buffer);
/* Waits until all is done. Idempotent. */
void ferry__deferral_drain(ferry__deferral *d);
/* Drops what is queued and waits for what runs. */
void ferry__deferral_discard(ferry__deferral *d);

#endif
