/* SPDX-License-Identifier: Apache-2.0 */
/* What a stranger may send to a rank: the messages of the proof, at either
 * end and in any step, and the card of another rank in the store. Without the
 * secret nothing may pass for a proof. The first byte says which. */
#include "comm/rendezvous_card.h"
#include "comm/tcp_proof.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const tcp__identity me = {.rank = 1,
                                 .world_size = 3,
                                 .generation = 7,
                                 .secret = "only the ranks know it"};

static void try_message(const uint8_t *data, size_t size, uint32_t step)
{
    tcp__proof p = {.called = step == TCP__PROOF, .peer = 2, .channel = 1};
    tcp__proof_message m = {0};
    ferry_status status;

    memcpy(m, data, size < sizeof(m) ? size : sizeof(m));
    (void)ferry__tcp_proof_is_foreign(data, size);
    if (step == TCP__HELLO) {
        status = ferry__tcp_proof_answer(&p, &me, m);
        if (status >= 0 &&
            (p.peer == me.rank || p.peer < 0 || p.peer >= me.world_size))
            abort();
        return;
    }
    status = ferry__tcp_proof_read(&p, &me, step, m);
    if (status >= 0 && step != TCP__CHALLENGE)
        abort();
}

static void try_card(const uint8_t *data, size_t size)
{
    ferry__rendezvous r = {.rank = 1,
                           .world_size = 3,
                           .generation = 7,
                           .timeout_ms = 1,
                           .secret = me.secret};
    char *value = malloc(size + 1), text[64];
    size_t left = size;

    if (!value)
        return;
    if (size > 0)
        memcpy(value, data, size);
    value[size] = '\0';
    ferry__card_peek(value, size, text, sizeof(text));
    if (ferry__card_open(&r, 2, value, &left) >= 0)
        abort();
    free(value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    if (data[0] % 5 == 0)
        try_card(data + 1, size - 1);
    else
        try_message(data + 1, size - 1, data[0] % 5);
    return 0;
}
