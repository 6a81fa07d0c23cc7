/* SPDX-License-Identifier: Apache-2.0 */
/* Cards and their proofs; see rendezvous_card.h. */
#include "comm/rendezvous_card.h"

#include "base/bytes.h"
#include "base/hmac.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROOF_CHARS ((size_t)2 * FERRY__HMAC_BYTES)
#define LABEL       "ferry rank card"
#define LABEL_BYTES 16

/* "<version> " and where the card begins after it. A card without a version
 * is one of version 1. */
static int32_t version_of(const char *value, size_t size, size_t *out_begin)
{
    size_t n = 0;
    long version = 0;

    while (n < size && n < 9 && value[n] >= '0' && value[n] <= '9')
        version = version * 10 + (value[n++] - '0');
    *out_begin = n + 1;
    return n > 0 && n < size && value[n] == ' ' ? (int32_t)version : 1;
}

/* HMAC-SHA256 over label, u32 version, u32 rank, u64 generation, u32 world
 * size, u32 0 and the card, as hexadecimal digits. */
static ferry_status prove(const ferry__rendezvous *r, int32_t rank,
                          const char *card, size_t card_bytes, char *out)
{
    unsigned char sum[FERRY__HMAC_BYTES];
    ferry_status status = FERRY_ENOMEM;
    ferry__str b = {0};

    ferry__put_text(&b, LABEL, LABEL_BYTES);
    ferry__put_u32(&b, FERRY__COMM_TCP_VERSION);
    ferry__put_u32(&b, (uint32_t)rank);
    ferry__put_u64(&b, r->generation);
    ferry__put_u32(&b, (uint32_t)r->world_size);
    ferry__put_u32(&b, 0);
    ferry__str_append_n(&b, card, card_bytes);
    if (!b.failed)
        status =
            ferry__hmac(r->secret, strlen(r->secret), b.data, b.length, sum);
    ferry__str_free(&b);
    FERRY_TRY(status);
    for (size_t i = 0; i < sizeof(sum); i++)
        snprintf(out + 2 * i, 3, "%02x", sum[i]);
    return FERRY_OK;
}

ferry_status ferry__card_seal(const ferry__rendezvous *r, const void *card,
                              size_t card_bytes, ferry__str *out)
{
    char proof[PROOF_CHARS + 1];

    FERRY_TRY(prove(r, r->rank, card, card_bytes, proof));
    ferry__str_printf(out, "%d ", FERRY__COMM_TCP_VERSION);
    ferry__str_append_n(out, card, card_bytes);
    ferry__str_printf(out, " %s", proof);
    return out->failed ? FERRY_ENOMEM : FERRY_OK;
}

ferry_status ferry__card_open(const ferry__rendezvous *r, int32_t rank,
                              void *value, size_t *size_bytes)
{
    char *text = value, want[PROOF_CHARS + 1], got[PROOF_CHARS + 1] = "";
    size_t size = *size_bytes, begin, n;
    int32_t version = version_of(text, size, &begin);

    if (version != FERRY__COMM_TCP_VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "rendezvous: rank %d has protocol version %d, this "
                          "is %d",
                          rank, version, FERRY__COMM_TCP_VERSION);
    if (size < begin + 1 + PROOF_CHARS)
        return ferry_fail(FERRY_EPEER,
                          "rendezvous: the card of rank %d is not readable",
                          rank);
    n = size - begin - 1 - PROOF_CHARS;
    memcpy(got, text + size - PROOF_CHARS, PROOF_CHARS);
    FERRY_TRY(prove(r, rank, text + begin, n, want));
    if (text[begin + n] != ' ' || !ferry__equal_secret(got, want))
        return ferry_fail(FERRY_EAUTH,
                          "rendezvous: the card of rank %d was not written by "
                          "a rank of this group: the secret is wrong",
                          rank);
    memmove(text, text + begin, n);
    text[n] = '\0';
    *size_bytes = n;
    return FERRY_OK;
}

void ferry__card_peek(const void *value, size_t size_bytes, char *out,
                      size_t out_bytes)
{
    size_t begin, n;

    version_of(value, size_bytes, &begin);
    n = size_bytes > begin + 1 + PROOF_CHARS
            ? size_bytes - begin - 1 - PROOF_CHARS
            : 0;
    snprintf(out, out_bytes, "%.*s", (int)n, (const char *)value + begin);
}
