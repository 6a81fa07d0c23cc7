/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 of stored parameters, as vLLM's /weight_checker gives them. */
#ifndef FERRY_SERVE_CHECKSUM_H
#define FERRY_SERVE_CHECKSUM_H

#include <ferry/worker.h>

/* {"param": "hex", …} of every stored parameter. Owned: ferry_free. */
ferry_status ferry__checksum_json(ferry_worker *worker, char **out_json);
/* Lower-case hex of the SHA-256 of bytes; out takes 65 bytes. */
void ferry__sha256_hex(const void *bytes, size_t size_bytes, char *out);

#endif
