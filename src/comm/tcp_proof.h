/* SPDX-License-Identifier: Apache-2.0 */
/* How two ranks prove to each other that they know the group's secret, on
 * each connection before anything else; docs/protocol.md has the bytes.
 * Four messages of one form: the caller's hello with its nonce, the other's
 * challenge with its own, the caller's proof, the other's welcome, which is a
 * proof too. A refusal may take the place of the second and the fourth.
 * Invariant: the secret is never sent, a proof is of use on its own
 * connection, in its own direction and once, and the one that is called
 * proves itself only to a caller that did. */
#ifndef FERRY_COMM_TCP_PROOF_H
#define FERRY_COMM_TCP_PROOF_H

#include "base/socket.h"
#include "comm/tcp.h"

#include <stdbool.h>

#define TCP__PROOF_BYTES 104 /* of every message */
#define TCP__NONCE_BYTES 32

enum { TCP__HELLO = 1, TCP__CHALLENGE, TCP__PROOF, TCP__WELCOME };

/* What a rank knows of itself and its group. */
typedef struct tcp__identity {
    int32_t rank, world_size;
    uint64_t generation;
    char secret[FERRY__COMM_TCP_SECRET + 1];
} tcp__identity;

/* One exchange, at one of its ends. */
typedef struct tcp__proof {
    bool called; /* this end did not begin it */
    int32_t peer;
    uint32_t channel;
    unsigned char mine[TCP__NONCE_BYTES], theirs[TCP__NONCE_BYTES];
} tcp__proof;

typedef unsigned char tcp__proof_message[TCP__PROOF_BYTES];

/* The caller's end. */
ferry_status ferry__tcp_proof_call(tcp__proof *p, int32_t peer,
                                   uint32_t channel);
/* The other one, which learns of peer and channel from the hello. */
ferry_status ferry__tcp_proof_answer(tcp__proof *p, const tcp__identity *id,
                                     const tcp__proof_message hello);
/* Writes this end's message of the step. */
ferry_status ferry__tcp_proof_write(const tcp__proof *p,
                                    const tcp__identity *id, uint32_t step,
                                    tcp__proof_message out);
/* Takes the other end's message of the step; the line says what is wrong.
 * FERRY_EPEER: it refuses or speaks something else; FERRY_EVERSION,
 * FERRY_EMISMATCH: another protocol, another group; FERRY_EAUTH: it does not
 * know the secret. */
ferry_status ferry__tcp_proof_read(tcp__proof *p, const tcp__identity *id,
                                   uint32_t step, const tcp__proof_message m);
/* The caller's messages on its connection, out and in. w->what names the
 * other end. FERRY_EPEER: it refuses this rank; FERRY_EVERSION, FERRY_EAUTH:
 * it is something else. */
ferry_status ferry__tcp_proof_say(const tcp__proof *p, const tcp__identity *id,
                                  uint32_t step, int fd,
                                  const ferry__waiter *w);
ferry_status ferry__tcp_proof_hear(tcp__proof *p, const tcp__identity *id,
                                   uint32_t step, int fd,
                                   const ferry__waiter *w);
bool ferry__tcp_proof_is_refusal(const tcp__proof_message m);
/* True once the first bytes cannot begin a message. */
bool ferry__tcp_proof_is_foreign(const unsigned char *bytes, size_t n);
void ferry__tcp_proof_refuse(tcp__proof_message out, const char *text);

#endif
