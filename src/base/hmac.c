/* SPDX-License-Identifier: Apache-2.0 */
/* HMAC-SHA256 and random bytes; see hmac.h. */
#include "base/hmac.h"

#include <errno.h>
#include <limits.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>
#include <sys/random.h>

ferry_status ferry__hmac(const void *key, size_t key_bytes, const void *bytes,
                         size_t size_bytes, unsigned char *out)
{
    unsigned char sum[EVP_MAX_MD_SIZE];
    unsigned int n = 0;

    if (key_bytes > INT_MAX ||
        !HMAC(EVP_sha256(), key, (int)key_bytes, bytes, size_bytes, sum, &n) ||
        n != FERRY__HMAC_BYTES)
        return ferry_fail(FERRY_EINTERNAL,
                          "HMAC-SHA256 of %zu bytes: the TLS library fails",
                          size_bytes);
    memcpy(out, sum, FERRY__HMAC_BYTES);
    return FERRY_OK;
}

bool ferry__hmac_equal(const unsigned char *a, const unsigned char *b)
{
    return CRYPTO_memcmp(a, b, FERRY__HMAC_BYTES) == 0;
}

ferry_status ferry__random_bytes(void *out, size_t size_bytes)
{
    char *at = out;

    while (size_bytes > 0) {
        ssize_t n = getrandom(at, size_bytes, 0);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return ferry_fail(FERRY_EIO, "random bytes: %s", strerror(errno));
        at += n;
        size_bytes -= (size_t)n;
    }
    return FERRY_OK;
}
