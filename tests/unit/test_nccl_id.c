/* SPDX-License-Identifier: Apache-2.0 */
/* The two forms of NCCL's unique id: the pickle of vLLM's store, byte by
 * byte as Python 3.11 makes it, and base64. O-18. */
#include "comm/unique_id.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* pickle.dumps of vLLM's ncclUniqueId with the bytes 0 to 127. */
static const unsigned char head[] =
    "\200\004\225\354\000\000\000\000\000\000\000\214\007_ctypes\224\214\011"
    "_unpickle\224\223\224\2144vllm.distributed.device_communicators."
    "pynccl_wrapper\224\214\014ncclUniqueId\224\223\224}\224C\200";
static const unsigned char tail[] = "\224\206\224\206\224R\224.";

static void fill(unsigned char id[FERRY__UNIQUE_ID])
{
    for (int i = 0; i < FERRY__UNIQUE_ID; i++)
        id[i] = (unsigned char)i;
}

static void pickle_is_what_python_makes(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID], out[FERRY__ID_PICKLE];

    (void)state;
    fill(id);
    ferry__id_pickle(id, out);
    assert_int_equal(sizeof(head) - 1, 111);
    assert_int_equal(111 + 128 + sizeof(tail) - 1, sizeof(out));
    assert_memory_equal(out, head, 111);
    assert_memory_equal(out + 111, id, 128);
    assert_memory_equal(out + 239, tail, sizeof(tail) - 1);
}

static void pickle_is_read_back(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID], got[FERRY__UNIQUE_ID];
    unsigned char out[FERRY__ID_PICKLE];

    (void)state;
    fill(id);
    ferry__id_pickle(id, out);
    assert_int_equal(ferry__id_unpickle(out, sizeof(out), got), FERRY_OK);
    assert_memory_equal(got, id, sizeof(id));
    out[1] = 5;
    assert_int_equal(ferry__id_unpickle(out, sizeof(out), got), FERRY_OK);
}

static void any_other_byte_is_refused_by_its_offset(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID], got[FERRY__UNIQUE_ID] = {9};
    unsigned char out[FERRY__ID_PICKLE];
    char want[32];

    (void)state;
    fill(id);
    for (size_t i = 0; i < sizeof(out); i++) {
        ferry__id_pickle(id, out);
        out[i] ^= 0x40;
        if (i >= 111 && i < 239) {
            assert_int_equal(ferry__id_unpickle(out, sizeof(out), got),
                             FERRY_OK);
            got[0] = 9;
            continue;
        }
        assert_int_equal(ferry__id_unpickle(out, sizeof(out), got),
                         FERRY_EPEER);
        snprintf(want, sizeof(want), "byte %zu is ", i);
        assert_non_null(strstr(ferry_last_error(), want));
        assert_int_equal(got[0], 9);
    }
}

static void any_other_length_is_refused(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID], got[FERRY__UNIQUE_ID];
    unsigned char out[FERRY__ID_PICKLE + 1] = {0};

    (void)state;
    fill(id);
    ferry__id_pickle(id, out);
    for (size_t n = 0; n < FERRY__ID_PICKLE; n++)
        assert_int_equal(ferry__id_unpickle(out, n, got), FERRY_EPEER);
    assert_int_equal(ferry__id_unpickle(out, sizeof(out), got), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "248 bytes, wants 247"));
}

/* base64.b64encode(bytes(range(128))) */
static const char text[] =
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1"
    "Njc4OTo7PD0+P0BBQkNERUZHSElKS0xNTk9QUVJTVFVWV1hZWltcXV5fYGFiY2RlZmdoaWpr"
    "bG1ub3BxcnN0dXZ3eHl6e3x9fn8=";

static void base64_is_what_python_makes(void **state)
{
    unsigned char id[FERRY__UNIQUE_ID], got[FERRY__UNIQUE_ID];
    char out[FERRY__ID_BASE64 + 1];

    (void)state;
    fill(id);
    ferry__id_base64(id, out);
    assert_string_equal(out, text);
    assert_int_equal(ferry__id_from_base64(out, got), FERRY_OK);
    assert_memory_equal(got, id, sizeof(id));
    for (int i = 0; i < FERRY__UNIQUE_ID; i++)
        id[i] = (unsigned char)(255 - i * 2);
    ferry__id_base64(id, out);
    assert_int_equal(ferry__id_from_base64(out, got), FERRY_OK);
    assert_memory_equal(got, id, sizeof(id));
}

static void refused(const char *wrong, const char *why)
{
    unsigned char got[FERRY__UNIQUE_ID];

    assert_int_equal(ferry__id_from_base64(wrong, got), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), why));
}

static void other_base64_is_refused_in_words(void **state)
{
    char wrong[sizeof(text)];

    (void)state;
    refused("", "must decode to 128 bytes, got 0");
    refused("AAEC", "must decode to 128 bytes, got 3");
    refused("AAE", "not valid standard base64");
    refused("AA=C", "not valid standard base64");
    refused("=", "not valid standard base64");
    memcpy(wrong, text, sizeof(wrong));
    wrong[3] = '-';
    refused(wrong, "URL-safe base64 is not accepted): character 3");
    memcpy(wrong, text, sizeof(wrong));
    wrong[FERRY__ID_BASE64 - 2] = '9';
    refused(wrong, "character 170");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pickle_is_what_python_makes),
        cmocka_unit_test(pickle_is_read_back),
        cmocka_unit_test(any_other_byte_is_refused_by_its_offset),
        cmocka_unit_test(any_other_length_is_refused),
        cmocka_unit_test(base64_is_what_python_makes),
        cmocka_unit_test(other_base64_is_refused_in_words),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
