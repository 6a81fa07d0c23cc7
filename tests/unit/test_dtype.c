/* SPDX-License-Identifier: Apache-2.0 */
/* Names, aliases and sizes of element types; which converts to which. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "core/copy.h"
#include <string.h>

static ferry_dtype parsed(const char *name)
{
    ferry_dtype d = FERRY_DTYPE_NONE;
    assert_int_equal(ferry_dtype_parse(name, &d), FERRY_OK);
    return d;
}

static void o28_spellings_have_documented_answers(void **state)
{
    (void)state;
    ferry_dtype d = FERRY_DTYPE_NONE;
    assert_int_equal(parsed("bfloat16"), FERRY_DTYPE_BF16);
    assert_int_equal(parsed("torch.bfloat16"), FERRY_DTYPE_BF16);
    assert_int_equal(parsed("BFLOAT16"), FERRY_DTYPE_BF16);
    assert_int_equal(parsed("bf16"), FERRY_DTYPE_BF16);
    assert_int_equal(parsed("float8_e4m3fn"), FERRY_DTYPE_F8_E4M3);
    assert_int_equal(ferry_dtype_parse("", &d), FERRY_EUNKNOWN);
    assert_int_equal(ferry_dtype_parse("float13", &d), FERRY_EUNKNOWN);
    assert_non_null(strstr(ferry_last_error(), "float13"));
    assert_non_null(strstr(ferry_last_error(), "bfloat16"));
    assert_non_null(strstr(ferry_last_error(), "float8_e5m2"));
    assert_int_equal(d, FERRY_DTYPE_NONE);
}

static void aliases_are_read(void **state)
{
    (void)state;
    assert_int_equal(parsed("f64"), FERRY_DTYPE_F64);
    assert_int_equal(parsed("Double"), FERRY_DTYPE_F64);
    assert_int_equal(parsed("torch.float"), FERRY_DTYPE_F32);
    assert_int_equal(parsed("f32"), FERRY_DTYPE_F32);
    assert_int_equal(parsed("half"), FERRY_DTYPE_F16);
    assert_int_equal(parsed("f16"), FERRY_DTYPE_F16);
    assert_int_equal(parsed("fp8_e4m3"), FERRY_DTYPE_F8_E4M3);
    assert_int_equal(parsed("fp8_e5m2"), FERRY_DTYPE_F8_E5M2);
    assert_int_equal(parsed("long"), FERRY_DTYPE_I64);
    assert_int_equal(parsed("int"), FERRY_DTYPE_I32);
    assert_int_equal(parsed("short"), FERRY_DTYPE_I16);
}

static void a_bad_name_is_refused(void **state)
{
    (void)state;
    ferry_dtype d;
    assert_int_equal(ferry_dtype_parse(NULL, &d), FERRY_EINVAL);
    assert_int_equal(ferry_dtype_parse("torch.", &d), FERRY_EUNKNOWN);
    assert_int_equal(
        ferry_dtype_parse("bfloat16_and_a_very_long_tail_that_goes_on", &d),
        FERRY_EUNKNOWN);
}

static void every_name_reads_back(void **state)
{
    (void)state;
#define CHECK(name, value, text, elems, bytes)                                 \
    assert_string_equal(ferry_dtype_name(FERRY_DTYPE_##name), text);           \
    assert_int_equal(parsed(text), value);                                     \
    assert_int_equal(ferry_dtype_bytes(FERRY_DTYPE_##name), bytes);            \
    assert_int_equal(ferry_dtype_block(FERRY_DTYPE_##name), elems);
    FERRY_DTYPE_TABLE(CHECK)
    assert_string_equal(ferry_dtype_name(FERRY_DTYPE_NONE), "none");
    assert_int_equal(ferry_dtype_bytes(FERRY_DTYPE_NONE), 0);
    assert_int_equal(ferry_dtype_block((ferry_dtype)99), 0);
    assert_int_equal(ferry_dtype_bytes((ferry_dtype)99), 0);
}

static void floats_convert_and_integers_only_stay(void **state)
{
    (void)state;
    assert_true(ferry__dtype_converts(FERRY_DTYPE_F32, FERRY_DTYPE_BF16));
    assert_true(ferry__dtype_converts(FERRY_DTYPE_BF16, FERRY_DTYPE_F64));
    assert_true(ferry__dtype_converts(FERRY_DTYPE_F16, FERRY_DTYPE_Q8_0));
    assert_true(ferry__dtype_converts(FERRY_DTYPE_I32, FERRY_DTYPE_I32));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_I32, FERRY_DTYPE_I64));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_I32, FERRY_DTYPE_F32));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_F32, FERRY_DTYPE_I32));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_Q8_0, FERRY_DTYPE_Q8_0));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_I8, FERRY_DTYPE_Q8_0));
    assert_false(ferry__dtype_converts(FERRY_DTYPE_NONE, FERRY_DTYPE_F32));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(o28_spellings_have_documented_answers),
        cmocka_unit_test(aliases_are_read),
        cmocka_unit_test(a_bad_name_is_refused),
        cmocka_unit_test(every_name_reads_back),
        cmocka_unit_test(floats_convert_and_integers_only_stay),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
