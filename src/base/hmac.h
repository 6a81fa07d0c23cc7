/* SPDX-License-Identifier: Apache-2.0 */
/* HMAC-SHA256, by the TLS library, and random bytes.
 * Invariant: how long a comparison takes tells nothing about the bytes. */
#ifndef FERRY_BASE_HMAC_H
#define FERRY_BASE_HMAC_H

#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__HMAC_BYTES 32

ferry_status ferry__hmac(const void *key, size_t key_bytes, const void *bytes,
                         size_t size_bytes, unsigned char *out);
bool ferry__hmac_equal(const unsigned char *a, const unsigned char *b);
/* From the kernel, fit for keys and nonces. */
ferry_status ferry__random_bytes(void *out, size_t size_bytes);

#endif
