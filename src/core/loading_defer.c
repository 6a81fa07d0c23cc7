/* SPDX-License-Identifier: Apache-2.0 */
/* The loading's deferred part: boxes that must be quantised are packed and
 * hashed here and converted on the deferral's threads.
 * Invariant: within one update no two boxes overlap, so the order of its
 * conversions does not matter; a later update waits for what an earlier one
 * left in the same slot. */
#include "core/loading_state.h"

#include "base/log.h"

#include <string.h>

#define BLOCK 32 /* elements of a q8_0 block */

static bool is_quantised(const ferry__copy_op *op)
{
    return op->dst_dtype == FERRY_DTYPE_Q8_0 &&
           op->src_dtype != FERRY_DTYPE_Q8_0;
}

/* Rows of the outermost dimension that fit a buffer, in whole blocks, since
 * any dimension may be the one that blocks run along. 0: none do. */
static int64_t rows_of_piece(const ferry__copy_op *op)
{
    size_t row = ferry_dtype_bytes(op->src_dtype);
    int64_t rows;

    for (int32_t d = 1; d < op->ndim; d++)
        row *= (size_t)op->shape[d];
    if (row == 0)
        return 0;
    rows = (int64_t)(FERRY__DEFERRAL_PIECE / row);
    return op->shape[0] <= rows ? op->shape[0] : rows / BLOCK * BLOCK;
}

/* The memory is counted as held for as long as the round is open. */
static bool ready(ferry__loading *l)
{
    size_t bytes = ferry__deferral_bytes(l->deferral);

    if (l->defer_memory != NULL)
        return true;
    if (ferry__loading_hold(l, bytes, &l->defer_memory) == FERRY_OK &&
        ferry__deferral_lend(l->deferral, l->defer_memory) == FERRY_OK)
        return true;
    ferry__log(FERRY_LOG_WARN, "nothing is deferred: %s", ferry_last_error());
    ferry__loading_drop(l, l->defer_memory, bytes);
    l->defer_memory = NULL;
    return false;
}

/* Before anything is written to a slot in another update than the one whose
 * conversions may still be under way there. */
static void settle(ferry__loading *l, size_t slot)
{
    if (l->deferred_in[slot] == 0 || l->deferred_in[slot] == l->update)
        return;
    ferry__loading_drain(l);
    l->deferred_in[slot] = 0;
}

bool ferry__loading_defer(ferry__loading *l, size_t slot,
                          const ferry__copy_op *op, const void *src,
                          ferry__xxh3_state *hash)
{
    ferry__copy_op piece = *op, pack, packed;
    int64_t rows;

    if (l->deferral == NULL || l->model->params[slot].dtype != FERRY_DTYPE_Q8_0)
        return false;
    settle(l, slot);
    rows = op->ndim > 0 && is_quantised(op) ? rows_of_piece(op) : 0;
    if (rows == 0 || !ready(l))
        return false;
    l->deferred_in[slot] = l->update;
    for (int64_t at = 0; at < op->shape[0]; at += rows) {
        void *buffer = ferry__deferral_acquire(l->deferral);

        piece.shape[0] = op->shape[0] - at < rows ? op->shape[0] - at : rows;
        piece.src_offset = op->src_offset + at * op->src_stride[0];
        piece.dst_offset = op->dst_offset + at * op->dst_stride[0];
        ferry__op_pack(&piece, &pack);
        ferry__copy_run(&pack, buffer, src, hash);
        ferry__op_packed(&piece, &packed);
        ferry__deferral_submit(l->deferral, &packed,
                               ferry__loading_base(l, slot), buffer);
    }
    return true;
}

void ferry__loading_drain(ferry__loading *l)
{
    if (l->deferral != NULL)
        ferry__deferral_drain(l->deferral);
}

void ferry__loading_discard(ferry__loading *l)
{
    if (l->deferral == NULL)
        return;
    ferry__deferral_discard(l->deferral);
    ferry__loading_drop(l, l->defer_memory, ferry__deferral_bytes(l->deferral));
    l->defer_memory = NULL;
    memset(l->deferred_in, 0, l->model->n_params * sizeof(*l->deferred_in));
}
