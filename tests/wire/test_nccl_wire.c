/* SPDX-License-Identifier: Apache-2.0 */
/* Golden bytes of the nccl backend: hello, header and head as
 * docs/protocol.md has them, written out by hand; the two dicts, with vLLM's
 * own words where vLLM has some. */
#include "backends/nccl/nccl_wire.h"
#include "comm/unique_id.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Compares a message with bytes given as hex, blanks ignored; what is left of
 * it must be zero. Frees it. */
static void expect_bytes(ferry__str *s, const char *hex)
{
    size_t n = 0;

    for (const char *p = hex; *p;) {
        unsigned value;

        if (*p == ' ') {
            p++;
            continue;
        }
        assert_int_equal(sscanf(p, "%2x", &value), 1);
        assert_true(n < s->length);
        if ((unsigned char)s->data[n] != value)
            fail_msg("byte %zu: 0x%02x, golden 0x%02x", n,
                     (unsigned char)s->data[n], value);
        n++;
        p += 2;
    }
    for (; n < s->length; n++)
        assert_int_equal(s->data[n], 0);
    ferry__str_free(s);
}

static ferry__nccl_hello hello_of(void)
{
    ferry__nccl_hello v = {.magic = FERRY__NCCL_MAGIC,
                           .version = 1,
                           .generation = 5,
                           .buffer_bytes = 0x40000000,
                           .n_buffers = 2,
                           .packed = 1,
                           .digest = 1,
                           .world_size = 3};

    strcpy(v.provider, "tcp");
    strcpy(v.settings, "A=1");
    return v;
}

static void hello_bytes(void **state)
{
    ferry__nccl_hello v = hello_of(), got;
    ferry__str s = {0};

    (void)state;
    ferry__nccl_put_hello(&s, &v);
    assert_int_equal(s.length, FERRY__NCCL_HELLO_BYTES);
    assert_int_equal(ferry__nccl_get_hello(s.data, s.length, &got), FERRY_OK);
    assert_true(got.buffer_bytes == 0x40000000);
    assert_string_equal(got.provider, "tcp");
    assert_string_equal(got.settings, "A=1");
    for (size_t n = 0; n < s.length; n++)
        if (n < 4 || n > 7) /* else it is another version's */
            assert_int_equal(ferry__nccl_get_hello(s.data, n, &got),
                             FERRY_EPEER);
    expect_bytes(&s, "4e46434c 01000000 0500000000000000 0000004000000000 "
                     "02000000 01000000 01000000 03000000 "
                     "74637000000000000000000000000000 413d31");
}

static void header_and_head_bytes(void **state)
{
    ferry__nccl_header v = {.magic = FERRY__NCCL_MAGIC,
                            .digest = 1,
                            .round = 7,
                            .manifest_digest = 0x0102030405060708,
                            .cuts_digest = 0x1112131415161718,
                            .n_buffers = 3,
                            .bytes = 300},
                       got;
    ferry__nccl_head h = {0x2122232425262728, 44}, got_head;
    ferry__str s = {0};

    (void)state;
    ferry__nccl_put_header(&s, &v);
    assert_int_equal(s.length, FERRY__NCCL_HEADER_BYTES);
    assert_int_equal(ferry__nccl_get_header(s.data, s.length, &got), FERRY_OK);
    assert_true(got.cuts_digest == v.cuts_digest && got.bytes == 300);
    assert_int_equal(ferry__nccl_get_header(s.data, 55, &got), FERRY_EPEER);
    s.data[4] = 2; /* neither digests nor none */
    assert_int_equal(ferry__nccl_get_header(s.data, 56, &got), FERRY_EPEER);
    s.data[4] = 1;
    expect_bytes(&s, "4e46434c 01000000 0700000000000000 0807060504030201 "
                     "1817161514131211 0300000000000000 2c01000000000000 "
                     "0000000000000000");
    ferry__nccl_put_head(&s, &h);
    assert_int_equal(s.length, FERRY__NCCL_HEAD_BYTES);
    assert_int_equal(ferry__nccl_get_head(s.data, 16, &got_head), FERRY_OK);
    assert_true(got_head.list_bytes == 44);
    memset(s.data + 8, 0xff, 8); /* takes no memory */
    assert_int_equal(ferry__nccl_get_head(s.data, 16, &got_head), FERRY_EPEER);
    s.length = 0;
    ferry__nccl_put_head(&s, &h);
    expect_bytes(&s, "2827262524232221 2c00000000000000");
}

static void expect_line(ferry_status want, ferry_status got, const char *a,
                        const char *b)
{
    if (got != want || !strstr(ferry_last_error(), a) ||
        !strstr(ferry_last_error(), b))
        fail_msg("%s: %s (wanted %s and %s)", ferry_status_name(got),
                 ferry_last_error(), a, b);
}

/* O-08, O-20: the field, and both values. */
static void o08_o20_a_hello_that_differs_is_named(void **state)
{
    ferry__nccl_hello t = hello_of(), w = t;

    (void)state;
    assert_int_equal(ferry__nccl_check_hello(&t, &w, 1), FERRY_OK);
    t.buffer_bytes = 64;
    w.buffer_bytes = 32;
    expect_line(FERRY_EMISMATCH, ferry__nccl_check_hello(&t, &w, 1),
                "packed_buffer_size_bytes: the trainer has 64", "rank 1 32");
    w = t = hello_of();
    w.packed = 0;
    expect_line(FERRY_EMISMATCH, ferry__nccl_check_hello(&t, &w, 2),
                "packed: the trainer has 1", "rank 2 0");
    w = t;
    w.n_buffers = 4;
    expect_line(FERRY_EMISMATCH, ferry__nccl_check_hello(&t, &w, 1),
                "packed_num_buffers", "rank 1 4");
    w = t;
    strcpy(t.settings, "NCCL_CUMEM_ENABLE=1");
    strcpy(w.settings, "NCCL_CUMEM_ENABLE=0");
    expect_line(FERRY_EMISMATCH, ferry__nccl_check_hello(&t, &w, 1),
                "\"NCCL_CUMEM_ENABLE=1\"", "\"NCCL_CUMEM_ENABLE=0\"");
    w = t;
    w.version = 2;
    expect_line(FERRY_EVERSION, ferry__nccl_check_hello(&t, &w, 1), "trainer 1",
                "rank 1 2");
    w = t;
    strcpy(w.provider, "ucx");
    expect_line(FERRY_EMISMATCH, ferry__nccl_check_hello(&t, &w, 1),
                "provider: the trainer has tcp", "ucx");
}

/* ---- the dicts ---- */

static void refused(const char *json, const char *a, const char *b)
{
    void *info = NULL;

    expect_line(FERRY_EINVAL,
                ferry_info_parse(&ferry__nccl_init_type, json, &info), a, b);
}

#define RANKS "\"rank_offset\":1,\"world_size\":3"

static void exactly_one_rendezvous_in_vllms_words(void **state)
{
    char id[FERRY__ID_BASE64 + 1], json[512];
    unsigned char bytes[FERRY__UNIQUE_ID], back[FERRY__UNIQUE_ID];
    void *info = NULL;

    (void)state;
    refused("{" RANKS "}",
            "need nccl_unique_id_b64, or both master_address and master_port",
            "(got master_address=None, master_port=None)");
    refused("{\"master_port\":5," RANKS "}", "master_address=None",
            "master_port=5");
    /* An empty text counts as none. */
    refused("{\"master_address\":\"\",\"nccl_unique_id_b64\":\"\"," RANKS "}",
            "master_address=None", "master_port=None");
    refused("{\"master_address\":\"a\",\"master_port\":5,"
            "\"nccl_unique_id_b64\":\"AAAA\"," RANKS "}",
            "pass nccl_unique_id_b64 OR master_address/master_port",
            "not both");
    refused("{\"nccl_unique_id_b64\":\"AAA_\"," RANKS "}",
            "not valid standard base64", "URL-safe base64 is not accepted");
    refused("{\"nccl_unique_id_b64\":\"AAA=AAAA\"," RANKS "}",
            "not valid standard base64", "");
    refused("{\"nccl_unique_id_b64\":\"AAAA\"," RANKS "}",
            "must decode to 128 bytes", "got 3");
    refused("{\"master_address\":\"a\",\"master_port\":5}", "rank_offset",
            "NCCLWeightTransferInitInfo");
    refused("{\"master_address\":\"a\",\"master_port\":5,\"color\":1," RANKS
            "}",
            "color", "");
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (unsigned char)(i * 37 + 5);
    ferry__id_base64(bytes, id);
    assert_int_equal(strlen(id), FERRY__ID_BASE64);
    /* 5, 42, 79 and 116, 153, 190 by hand; then two bytes and one "=". */
    assert_memory_equal(id, "BSpPdJm+", 8);
    assert_int_equal(id[FERRY__ID_BASE64 - 1], '=');
    assert_int_equal(ferry__id_from_base64(id, back), FERRY_OK);
    assert_memory_equal(back, bytes, sizeof(bytes));
    snprintf(json, sizeof(json), "{\"nccl_unique_id_b64\":\"%s\"," RANKS "}",
             id);
    assert_int_equal(ferry_info_parse(&ferry__nccl_init_type, json, &info),
                     FERRY_OK);
    assert_int_equal(((ferry__nccl_init_info *)info)->world_size, 3);
    assert_int_equal(((ferry__nccl_init_info *)info)->packed, 0);
    ferry_info_free(info);
}

static void a_ferry_trainers_fields_go_together(void **state)
{
    (void)state;
    refused("{\"transport\":\"ferry\",\"master_address\":\"a\","
            "\"master_port\":5,\"provider\":\"tcp\"," RANKS "}",
            "field secret", "beside transport");
    refused("{\"transport\":\"ferry\",\"master_address\":\"a\","
            "\"master_port\":5,\"provider\":\"tcp\",\"secret\":\"s\"," RANKS
            "}",
            "field generation", "beside transport");
}

/* All three lists may be left out: "as last round" of vLLM 0.33. */
static void an_update_is_three_lists(void **state)
{
    void *info = NULL;

    (void)state;
    assert_int_equal(ferry_info_parse(&ferry__nccl_update_type, "{}", &info),
                     FERRY_OK);
    ferry_info_free(info);
    expect_line(
        FERRY_EINVAL,
        ferry_info_parse(&ferry__nccl_update_type,
                         "{\"names\":[\"a\"],\"dtype_names\":[],\"shapes\":[]}",
                         &info),
        "dtype_names", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_bytes),
        cmocka_unit_test(header_and_head_bytes),
        cmocka_unit_test(o08_o20_a_hello_that_differs_is_named),
        cmocka_unit_test(exactly_one_rendezvous_in_vllms_words),
        cmocka_unit_test(a_ferry_trainers_fields_go_together),
        cmocka_unit_test(an_update_is_three_lists),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
