/* SPDX-License-Identifier: Apache-2.0 */
/* The messages by which ranks prove themselves; see tcp_proof.h.
 *
 * Message, 104 bytes, little-endian: 1. u32 magic "FTCP"  2. u32 version
 * 3. u64 generation  4. u32 world size  5. u32 rank of the sender  6. u32
 * rank meant  7. u32 channel  8. u32 step  9. u32 0  10. 32 bytes nonce of
 * the sender  11. 32 bytes proof, zeros in steps 1 and 2. */
#include "comm/tcp_proof.h"

#include "base/bytes.h"
#include "base/hmac.h"

#include <stdio.h>
#include <string.h>

#define MAGIC    0x50435446u
#define REFUSAL  0x214f4e46u /* "FNO!", u32 0, text */
#define NONCE_AT 40
#define PROOF_AT (NONCE_AT + TCP__NONCE_BYTES)
#define TEXT_AT  8

/* What a proof is made of, in this order. */
#define LABEL        "ferry tcp group"
#define LABEL_BYTES  16
#define PROVED_BYTES (LABEL_BYTES + 32 + 2 * TCP__NONCE_BYTES)

static void write_u64(unsigned char *p, uint64_t v)
{
    ferry__write_u32(p, (uint32_t)v);
    ferry__write_u32(p + 4, (uint32_t)(v >> 32));
}

static uint64_t read_u64(const unsigned char *p)
{
    return ferry__read_u32(p) | (uint64_t)ferry__read_u32(p + 4) << 32;
}

static ferry_status prove(const tcp__proof *p, const tcp__identity *id,
                          uint32_t step, unsigned char *out)
{
    unsigned char b[PROVED_BYTES] = LABEL, *at = b + LABEL_BYTES;
    uint32_t me = (uint32_t)id->rank, peer = (uint32_t)p->peer;

    ferry__write_u32(at, FERRY__COMM_TCP_VERSION);
    ferry__write_u32(at + 4, step);
    write_u64(at + 8, id->generation);
    ferry__write_u32(at + 16, (uint32_t)id->world_size);
    ferry__write_u32(at + 20, p->called ? peer : me);
    ferry__write_u32(at + 24, p->called ? me : peer);
    ferry__write_u32(at + 28, p->channel);
    memcpy(at + 32, p->called ? p->theirs : p->mine, TCP__NONCE_BYTES);
    memcpy(at + 32 + TCP__NONCE_BYTES, p->called ? p->mine : p->theirs,
           TCP__NONCE_BYTES);
    return ferry__hmac(id->secret, strlen(id->secret), b, sizeof(b), out);
}

/* What the two must have in common, whatever the step. */
static ferry_status check_group(const tcp__identity *id, uint32_t step,
                                const unsigned char *m)
{
    if (ferry__read_u32(m) != MAGIC)
        return ferry_fail(FERRY_EPEER, "it does not speak the protocol");
    if (ferry__read_u32(m + 4) != FERRY__COMM_TCP_VERSION)
        return ferry_fail(FERRY_EVERSION, "protocol version %u, this is %d",
                          ferry__read_u32(m + 4), FERRY__COMM_TCP_VERSION);
    if (ferry__read_u32(m + 32) != step)
        return ferry_fail(FERRY_EPEER, "step %u of the proof, not %u",
                          ferry__read_u32(m + 32), step);
    if (read_u64(m + 8) != id->generation)
        return ferry_fail(FERRY_EMISMATCH, "generation %llu, this is %llu",
                          (unsigned long long)read_u64(m + 8),
                          (unsigned long long)id->generation);
    if (ferry__read_u32(m + 16) != (uint32_t)id->world_size)
        return ferry_fail(FERRY_EMISMATCH, "world size %u, this is %d",
                          ferry__read_u32(m + 16), id->world_size);
    if (ferry__read_u32(m + 24) != (uint32_t)id->rank)
        return ferry_fail(FERRY_EMISMATCH, "it looks for rank %u, this is %d",
                          ferry__read_u32(m + 24), id->rank);
    return FERRY_OK;
}

ferry_status ferry__tcp_proof_call(tcp__proof *p, int32_t peer,
                                   uint32_t channel)
{
    *p = (tcp__proof){.peer = peer, .channel = channel};
    return ferry__random_bytes(p->mine, sizeof(p->mine));
}

ferry_status ferry__tcp_proof_answer(tcp__proof *p, const tcp__identity *id,
                                     const tcp__proof_message hello)
{
    uint32_t peer = ferry__read_u32(hello + 20);

    FERRY_TRY(check_group(id, TCP__HELLO, hello));
    if (peer >= (uint32_t)id->world_size || peer == (uint32_t)id->rank)
        return ferry_fail(FERRY_EMISMATCH, "rank %u calls rank %d of %d", peer,
                          id->rank, id->world_size);
    *p = (tcp__proof){.called = true,
                      .peer = (int32_t)peer,
                      .channel = ferry__read_u32(hello + 28)};
    memcpy(p->theirs, hello + NONCE_AT, sizeof(p->theirs));
    return ferry__random_bytes(p->mine, sizeof(p->mine));
}

ferry_status ferry__tcp_proof_write(const tcp__proof *p,
                                    const tcp__identity *id, uint32_t step,
                                    tcp__proof_message out)
{
    memset(out, 0, TCP__PROOF_BYTES);
    ferry__write_u32(out, MAGIC);
    ferry__write_u32(out + 4, FERRY__COMM_TCP_VERSION);
    write_u64(out + 8, id->generation);
    ferry__write_u32(out + 16, (uint32_t)id->world_size);
    ferry__write_u32(out + 20, (uint32_t)id->rank);
    ferry__write_u32(out + 24, (uint32_t)p->peer);
    ferry__write_u32(out + 28, p->channel);
    ferry__write_u32(out + 32, step);
    memcpy(out + NONCE_AT, p->mine, sizeof(p->mine));
    if (step < TCP__PROOF)
        return FERRY_OK;
    return prove(p, id, step, out + PROOF_AT);
}

ferry_status ferry__tcp_proof_read(tcp__proof *p, const tcp__identity *id,
                                   uint32_t step, const tcp__proof_message m)
{
    unsigned char want[FERRY__HMAC_BYTES];

    if (ferry__tcp_proof_is_refusal(m))
        return ferry_fail(FERRY_EPEER, "%.*s", TCP__PROOF_BYTES - TEXT_AT - 1,
                          (const char *)m + TEXT_AT);
    FERRY_TRY(check_group(id, step, m));
    if (ferry__read_u32(m + 20) != (uint32_t)p->peer ||
        ferry__read_u32(m + 28) != p->channel)
        return ferry_fail(FERRY_EMISMATCH,
                          "it is rank %u on channel %u, not rank %d on %u",
                          ferry__read_u32(m + 20), ferry__read_u32(m + 28),
                          p->peer, p->channel);
    if (step == TCP__CHALLENGE) {
        memcpy(p->theirs, m + NONCE_AT, sizeof(p->theirs));
        return FERRY_OK;
    }
    /* The nonces of this end are what counts, whatever the message says. */
    FERRY_TRY(prove(p, id, step, want));
    if (!ferry__hmac_equal(m + PROOF_AT, want))
        return ferry_fail(FERRY_EAUTH, "the secret is wrong");
    return FERRY_OK;
}

ferry_status ferry__tcp_proof_say(const tcp__proof *p, const tcp__identity *id,
                                  uint32_t step, int fd, const ferry__waiter *w)
{
    tcp__proof_message mine;

    FERRY_TRY(ferry__tcp_proof_write(p, id, step, mine));
    return ferry__send_all(fd, mine, sizeof(mine), w);
}

ferry_status ferry__tcp_proof_hear(tcp__proof *p, const tcp__identity *id,
                                   uint32_t step, int fd,
                                   const ferry__waiter *w)
{
    tcp__proof_message got;
    char line[512];
    ferry_status status;

    FERRY_TRY(ferry__recv_all(fd, got, sizeof(got), w));
    status = ferry__tcp_proof_read(p, id, step, got);
    if (status >= 0)
        return FERRY_OK;
    snprintf(line, sizeof(line), "%s", ferry_last_error());
    if (ferry__tcp_proof_is_refusal(got))
        return ferry_fail(FERRY_EPEER, "%s refused this rank: %s", w->what,
                          line);
    return ferry_fail(status == FERRY_EVERSION ? status : FERRY_EAUTH,
                      "%s: what answers there is not it: %s", w->what, line);
}

bool ferry__tcp_proof_is_refusal(const tcp__proof_message m)
{
    return ferry__read_u32(m) == REFUSAL;
}

bool ferry__tcp_proof_is_foreign(const unsigned char *bytes, size_t n)
{
    return n >= 4 && ferry__read_u32(bytes) != MAGIC;
}

void ferry__tcp_proof_refuse(tcp__proof_message out, const char *text)
{
    memset(out, 0, TCP__PROOF_BYTES);
    ferry__write_u32(out, REFUSAL);
    memcpy(out + TEXT_AT, text, strnlen(text, TCP__PROOF_BYTES - TEXT_AT - 1));
}
