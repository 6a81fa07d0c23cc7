/* SPDX-License-Identifier: Apache-2.0 */
/* Settings: the program's value, then the variable, then the default. */
#include "base/config.h"

#include <ctype.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void variables_are_keys_in_capitals(void **state)
{
    static const char *const ids[] = {
#define ID(id, key, def, unit, help) #id,
        FERRY__CONFIG_TABLE(ID)
#undef ID
    };
    static const char *const keys[] = {
#define KEY(id, key, def, unit, help) key,
        FERRY__CONFIG_TABLE(KEY)
#undef KEY
    };

    (void)state;
    for (size_t i = 0; i < FERRY__CONFIG_COUNT; i++) {
        assert_int_equal(strlen(ids[i]), strlen(keys[i]));
        for (size_t k = 0; keys[i][k]; k++)
            assert_int_equal(toupper((unsigned char)keys[i][k]), ids[i][k]);
    }
}

static void the_programs_value_wins_over_the_variable(void **state)
{
    char text[] = "secret";
    const char *old;

    (void)state;
    unsetenv("FERRY_TOKEN");
    assert_string_equal(ferry__config_get(FERRY__CONFIG_TOKEN), "");
    setenv("FERRY_TOKEN", "from-env", 1);
    assert_string_equal(ferry__config_get(FERRY__CONFIG_TOKEN), "from-env");
    assert_int_equal(ferry__config_set("token", text), FERRY_OK);
    text[0] = 'X'; /* the value was copied */
    old = ferry__config_get(FERRY__CONFIG_TOKEN);
    assert_string_equal(old, "secret");
    assert_int_equal(ferry__config_set("token", "other"), FERRY_OK);
    assert_string_equal(ferry__config_get(FERRY__CONFIG_TOKEN), "other");
    assert_string_equal(old, "secret"); /* still readable */
    unsetenv("FERRY_TOKEN");
}

static void a_variable_with_a_wrong_value_is_the_default(void **state)
{
    (void)state;
    setenv("FERRY_COPY", "sideways", 1);
    assert_string_equal(ferry__config_get(FERRY__CONFIG_COPY), "auto");
    setenv("FERRY_COPY", "stream", 1);
    assert_string_equal(ferry__config_get(FERRY__CONFIG_COPY), "stream");
    setenv("FERRY_COPY", "str", 1); /* no prefix of a value is a value */
    assert_string_equal(ferry__config_get(FERRY__CONFIG_COPY), "auto");
    unsetenv("FERRY_COPY");
}

static void wrong_keys_and_values_are_refused_in_words(void **state)
{
    (void)state;
    assert_int_equal(ferry__config_set("colour", "red"), FERRY_EUNKNOWN);
    assert_string_equal(ferry_last_error(),
                        "unknown setting 'colour'; known: log_level, "
                        "log_format, module_path, token, copy, "
                        "host_name, nccl_library, nccl_host_address, "
                        "nccl_host_timeout_ms, cuda_library, fault");
    assert_int_equal(ferry__config_set("log_level", "loud"), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(),
                           "must be one of error|warn|info|debug, got "
                           "'loud'"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(variables_are_keys_in_capitals),
        cmocka_unit_test(the_programs_value_wins_over_the_variable),
        cmocka_unit_test(a_variable_with_a_wrong_value_is_the_default),
        cmocka_unit_test(wrong_keys_and_values_are_refused_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
