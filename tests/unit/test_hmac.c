/* SPDX-License-Identifier: Apache-2.0 */
/* HMAC-SHA256 by the cases of RFC 4231, comparison and random bytes. */
#include "base/hmac.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void check(const void *key, size_t key_bytes, const char *text,
                  const char *want)
{
    unsigned char sum[FERRY__HMAC_BYTES];
    char hex[2 * FERRY__HMAC_BYTES + 1];

    assert_int_equal(ferry__hmac(key, key_bytes, text, strlen(text), sum),
                     FERRY_OK);
    for (size_t i = 0; i < sizeof(sum); i++)
        snprintf(hex + 2 * i, 3, "%02x", sum[i]);
    assert_string_equal(hex, want);
}

static void rfc_4231_cases(void **state)
{
    unsigned char key[131];

    (void)state;
    memset(key, 0x0b, 20);
    check(key, 20, "Hi There",
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check("Jefe", 4, "what do ya want for nothing?",
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof(key));
    check(key, sizeof(key),
          "Test Using Larger Than Block-Size Key - Hash Key First",
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void every_byte_counts(void **state)
{
    unsigned char a[FERRY__HMAC_BYTES] = {1, 2, 3}, b[FERRY__HMAC_BYTES];

    (void)state;
    memcpy(b, a, sizeof(b));
    assert_true(ferry__hmac_equal(a, b));
    for (size_t i = 0; i < sizeof(b); i++) {
        b[i] ^= 0x80;
        assert_false(ferry__hmac_equal(a, b));
        b[i] ^= 0x80;
    }
}

static void random_bytes_differ_and_fill(void **state)
{
    unsigned char a[300] = {0}, b[300] = {0}, none[16] = {0};

    (void)state;
    assert_int_equal(ferry__random_bytes(a, sizeof(a)), FERRY_OK);
    assert_int_equal(ferry__random_bytes(b, sizeof(b)), FERRY_OK);
    assert_memory_not_equal(a, b, sizeof(a));
    assert_memory_not_equal(a + sizeof(a) - 16, none, 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rfc_4231_cases),
        cmocka_unit_test(every_byte_counts),
        cmocka_unit_test(random_bytes_differ_and_fill),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
