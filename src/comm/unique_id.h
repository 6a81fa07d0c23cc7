/* SPDX-License-Identifier: Apache-2.0 */
/* The forms in which NCCL's unique id crosses between ranks: 128 bytes that
 * mean nothing here.
 * Invariant: what is read is compared byte by byte with the one form that is
 * written; nothing of a pickle is ever carried out. */
#ifndef FERRY_COMM_UNIQUE_ID_H
#define FERRY_COMM_UNIQUE_ID_H

#include "comm/provider.h"

#define FERRY__ID_PICKLE 247 /* bytes */
#define FERRY__ID_BASE64 172 /* characters */
/* Under which vLLM's rank 0 puts the pickle (StatelessProcessGroup's first
 * broadcast). */
#define FERRY__ID_KEY "broadcast_from/0/0"

/* What Python's pickle makes of vLLM's ncclUniqueId, protocol 4. */
void ferry__id_pickle(const void *id, unsigned char out[FERRY__ID_PICKLE]);
/* Protocols 4 and 5 differ in one byte; both are taken. FERRY_EPEER names
 * the first offset that differs. */
ferry_status ferry__id_unpickle(const void *bytes, size_t size_bytes,
                                void *out_id);

/* Standard base64, NUL terminated. */
void ferry__id_base64(const void *id, char out[FERRY__ID_BASE64 + 1]);
ferry_status ferry__id_from_base64(const char *text, void *out_id);

#endif
