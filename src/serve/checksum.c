/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 of stored parameters; see checksum.h. */
#include "serve/checksum.h"

#include "base/str.h"

#include <openssl/sha.h>
#include <string.h>

void ferry__sha256_hex(const void *bytes, size_t size_bytes, char *out)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char sum[SHA256_DIGEST_LENGTH];

    SHA256(bytes, size_bytes, sum);
    for (size_t i = 0; i < sizeof sum; i++) {
        out[2 * i] = digits[sum[i] >> 4];
        out[2 * i + 1] = digits[sum[i] & 15];
    }
    out[2 * sizeof sum] = '\0';
}

static void add_param(void *arg, const char *name, const void *bytes,
                      size_t size_bytes)
{
    ferry__str *s = arg;
    char hex[2 * SHA256_DIGEST_LENGTH + 1];

    ferry__sha256_hex(bytes, size_bytes, hex);
    ferry__str_append(s, s->length > 1 ? "," : "");
    ferry__str_json(s, name);
    ferry__str_printf(s, ":\"%s\"", hex);
}

ferry_status ferry__checksum_json(ferry_worker *worker, char **out_json)
{
    ferry__str s = {0};
    ferry_status st;

    ferry__str_append(&s, "{");
    st = ferry_worker_each_param(worker, add_param, &s);
    ferry__str_append(&s, "}");
    if (st != FERRY_OK) {
        ferry__str_free(&s);
        return st;
    }
    return ferry__str_take(&s, out_json);
}
