/* SPDX-License-Identifier: Apache-2.0 */
/* Where a stream of whole tensors is cut into buffers.
 * Invariant: both ends run this over the same metadata and the same limit
 * and so agree; the digest of the cuts proves it. */
#include "core/packing.h"
#include "base/alloc.h"
#include "base/hash.h"
#include "base/log.h"
#include "core/manifest.h"
#include <string.h>

typedef struct cutter {
    ferry__cuts cuts;
    size_t counts_capacity, bytes_capacity;
    size_t open_count; /* tensors in the open buffer */
    uint64_t open_bytes;
} cutter;

static ferry_status flush(cutter *c)
{
    FERRY_TRY(ferry__grow(&c->cuts.counts, &c->counts_capacity,
                          c->cuts.n_buffers, sizeof(*c->cuts.counts)));
    FERRY_TRY(ferry__grow(&c->cuts.bytes, &c->bytes_capacity, c->cuts.n_buffers,
                          sizeof(*c->cuts.bytes)));
    c->cuts.counts[c->cuts.n_buffers] = c->open_count;
    c->cuts.bytes[c->cuts.n_buffers] = c->open_bytes;
    c->cuts.n_buffers++;
    if (c->open_bytes > c->cuts.peak_bytes)
        c->cuts.peak_bytes = c->open_bytes;
    c->open_count = 0;
    c->open_bytes = 0;
    return FERRY_OK;
}

static ferry_status put(cutter *c, ferry__cut_rule rule, uint64_t bytes,
                        uint64_t limit)
{
    if (rule == FERRY__CUT_FIT && c->open_bytes > 0 &&
        (bytes > limit || c->open_bytes > limit - bytes))
        FERRY_TRY(flush(c));
    if (bytes > UINT64_MAX - c->open_bytes)
        return ferry_fail(
            FERRY_EOVERFLOW, "a buffer of %llu and %llu bytes is too large",
            (unsigned long long)c->open_bytes, (unsigned long long)bytes);
    c->open_count++;
    c->open_bytes += bytes;
    if (rule == FERRY__CUT_EACH ||
        (rule == FERRY__CUT_EXCEED && c->open_bytes > limit))
        FERRY_TRY(flush(c));
    return FERRY_OK;
}

static void put_u64(unsigned char *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(value >> (8 * i));
}

/* Format: per buffer u64 count, u64 bytes, little-endian, no gaps. */
static ferry_status digest_cuts(ferry__cuts *cuts)
{
    unsigned char pair[16];
    ferry__xxh3_state *state = ferry__xxh3_create();
    if (!state)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < cuts->n_buffers; i++) {
        put_u64(pair, cuts->counts[i]);
        put_u64(pair + 8, cuts->bytes[i]);
        ferry__xxh3_update(state, pair, sizeof(pair));
    }
    cuts->digest = ferry__xxh3_value(state);
    ferry__xxh3_destroy(state);
    return FERRY_OK;
}

static void warn_of_large(const ferry_param_meta *params, size_t count,
                          uint64_t limit)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = ferry__meta_bytes(&params[i]);
        if (bytes <= limit)
            continue;
        ferry__log(FERRY_LOG_WARN,
                   "parameter %s alone has %llu bytes, more than the buffer "
                   "limit of %llu",
                   params[i].name, (unsigned long long)bytes,
                   (unsigned long long)limit);
        return;
    }
}

static ferry_status cut_all(cutter *c, ferry__cut_rule rule,
                            const ferry_param_meta *params, size_t count,
                            uint64_t limit)
{
    for (size_t i = 0; i < count; i++)
        FERRY_TRY(put(c, rule, ferry__meta_bytes(&params[i]), limit));
    if (c->open_count > 0)
        FERRY_TRY(flush(c));
    return digest_cuts(&c->cuts);
}

ferry_status ferry__cuts_again(ferry__cut_rule rule,
                               const ferry_param_meta *params, size_t count,
                               uint64_t limit_bytes, ferry__cuts *out)
{
    cutter c;
    if (limit_bytes == 0 && rule != FERRY__CUT_EACH)
        return ferry_fail(FERRY_EINVAL,
                          "packed_buffer_size_bytes is 0, must be > 0");
    memset(&c, 0, sizeof(c));
    ferry_status st = cut_all(&c, rule, params, count, limit_bytes);
    if (st < 0) {
        ferry__cuts_free(&c.cuts);
        return st;
    }
    *out = c.cuts;
    return FERRY_OK;
}

ferry_status ferry__cuts_make(ferry__cut_rule rule,
                              const ferry_param_meta *params, size_t count,
                              uint64_t limit_bytes, ferry__cuts *out)
{
    FERRY_TRY(ferry__cuts_again(rule, params, count, limit_bytes, out));
    if (rule != FERRY__CUT_EACH)
        warn_of_large(params, count, limit_bytes);
    return FERRY_OK;
}

void ferry__cuts_free(ferry__cuts *cuts)
{
    ferry__free(cuts->counts);
    ferry__free(cuts->bytes);
    memset(cuts, 0, sizeof(*cuts));
}
