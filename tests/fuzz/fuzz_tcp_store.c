/* SPDX-License-Identifier: Apache-2.0 */
/* What a client of the rendezvous store may send. The first byte is the size
 * of the pieces; fed whole or in pieces, the answers must be the same. */
#include "comm/tcp_store_state.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const unsigned char hello[] = {0, 0xce, 0xf7, 0x85, 0x3c};

static ferry_status feed(ferry__store_state *s, ferry__store_peer *p,
                         const uint8_t *data, size_t size, size_t piece)
{
    ferry_status status = ferry__store_feed(s, p, hello, sizeof(hello));

    for (size_t at = 0; status >= 0 && at < size; at += piece) {
        size_t n = size - at < piece ? size - at : piece;

        status = ferry__store_feed(s, p, data + at, n);
    }
    return status;
}

static void check_sums(const ferry__store_state *s)
{
    size_t sum = 0;

    for (const ferry__store_peer *p = s->peers; p; p = p->next) {
        sum += p->in_capacity + p->out.length + p->wanted_bytes;
        if (p->waiting && p->first_missing >= p->n_wanted)
            abort();
    }
    if (sum != s->buffered_bytes ||
        s->map.total_bytes > FERRY__STORE_TOTAL_BYTES)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__store_state *one = calloc(1, sizeof(*one));
    ferry__store_state *two = calloc(1, sizeof(*two));
    ferry__store_peer *a, *b;
    size_t piece = size > 0 ? data[0] % 37 + 1u : 1;

    if (size > 0 && one && two && ferry__store_peer_add(one, &a) >= 0 &&
        ferry__store_peer_add(two, &b) >= 0) {
        ferry_status whole = feed(one, a, data + 1, size - 1, size);
        ferry_status cut = feed(two, b, data + 1, size - 1, piece);

        check_sums(one);
        check_sums(two);
        if (whole != cut || a->out.length != b->out.length ||
            one->map.count != two->map.count)
            abort();
        if (a->out.length > 0 &&
            memcmp(a->out.data, b->out.data, a->out.length) != 0)
            abort();
    }
    if (one)
        ferry__store_state_free(one);
    if (two)
        ferry__store_state_free(two);
    free(one);
    free(two);
    return 0;
}
