/* SPDX-License-Identifier: Apache-2.0 */
/* One-sided gets of a tcp group: a rank that exposes memory serves it on a
 * thread and a port of its own, which the keys name.
 * Invariant: only a rank of this group, which proves it on each connection
 * (tcp_proof.h), sees a byte, and only of what is exposed at that time. */
#ifndef FERRY_COMM_TCP_PULL_H
#define FERRY_COMM_TCP_PULL_H

#include "comm/tcp_private.h"

/* Little-endian on the wire, in this order, without padding. */
#define TCP__PULL_ASK_BYTES    32 /* u32 magic, u32 0, u64 id, offset, bytes */
#define TCP__PULL_ANSWER_BYTES 16 /* u32 magic, i32 status, u64 bytes */
#define TCP__PULL_MAGIC        UINT32_C(0x4c505446) /* "FTPL" */

typedef struct tcp__pull_server tcp__pull_server;

/* Serves at `host` ("" every address) until closed; `id` is copied. */
ferry_status ferry__tcp_pull_serve(const char *host, const tcp__identity *id,
                                   tcp__pull_server **out);
void ferry__tcp_pull_server_close(tcp__pull_server **server);
int32_t ferry__tcp_pull_port(const tcp__pull_server *s);
ferry_status ferry__tcp_pull_add(tcp__pull_server *s, const void *bytes,
                                 size_t size_bytes, uint64_t *out_id);
void ferry__tcp_pull_remove(tcp__pull_server *s, const void *bytes);

/* ---- of a group ---- */

ferry_status ferry__tcp_expose(ferry__comm *comm, void *bytes,
                               size_t size_bytes, void *out_key,
                               size_t *out_key_bytes);
void ferry__tcp_unexpose(ferry__comm *comm, void *bytes);
ferry_status ferry__tcp_pull(ferry__comm *comm, void *bytes, size_t size_bytes,
                             int32_t from, const void *key, size_t key_bytes,
                             uint64_t offset, int64_t timeout_ms);
void ferry__tcp_pulls_close(tcp__comm *c);

#endif
