/* SPDX-License-Identifier: Apache-2.0 */
/* Shared objects as the registries open them: where they are looked for, once
 * opened for good, every failure said each time (F1). */
#include "core/module.h"

#include "base/alloc.h"
#include "base/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

static const char *test_module(const char *name)
{
    static char path[4096];
    const char *folder = getenv("FERRY_TEST_MODULES");

    snprintf(path, sizeof(path), "%s/%s.so",
             folder != NULL ? folder : "tests/modules", name);
    return path;
}

static void ours_are_beside_libferry_or_where_the_setting_says(void **state)
{
    char folder[4096], path[4096], before[4096];

    (void)state;
    snprintf(before, sizeof(before), "%s",
             ferry__config_get(FERRY__CONFIG_MODULE_PATH));
    assert_int_equal(ferry__config_set("module_path", ""), FERRY_OK);
    assert_int_equal(ferry__module_folder(folder, sizeof(folder)), FERRY_OK);
    assert_true(folder[0] == '/');
    assert_string_equal(folder + strlen(folder) - 6, "/ferry");

    assert_int_equal(ferry__config_set("module_path", "/some/where"), 0);
    assert_int_equal(ferry__module_path("ferry_x", path, sizeof(path)), 0);
    assert_string_equal(path, "/some/where/ferry_x.so");
    assert_false(ferry__module_present("ferry_x"));
    refused(ferry__module_folder(folder, 5), FERRY_EOVERFLOW, "too long");
    refused(ferry__module_path("ferry_x", path, 15), FERRY_EOVERFLOW,
            "too long");
    assert_int_equal(ferry__config_set("module_path", before), FERRY_OK);
}

static void paths_that_are_too_long_are_refused(void **state)
{
    char before[4096], *text = malloc(5001);
    void *symbol;

    (void)state;
    assert_non_null(text);
    memset(text, 'p', 5000);
    text[5000] = '\0';
    snprintf(before, sizeof(before), "%s",
             ferry__config_get(FERRY__CONFIG_MODULE_PATH));
    /* A bare name, a path, and a folder of ours. */
    refused(ferry__module_symbol(text, "s", &symbol), FERRY_EOVERFLOW,
            "too long");
    text[0] = '/';
    refused(ferry__module_symbol(text, "s", &symbol), FERRY_EOVERFLOW,
            "too long");
    assert_int_equal(ferry__config_set("module_path", text), FERRY_OK);
    assert_false(ferry__module_present("ferry_x"));
    refused(ferry__module_symbol("ferry_x", "s", &symbol), FERRY_EOVERFLOW,
            "too long");
    assert_int_equal(ferry__config_set("module_path", before), FERRY_OK);
    free(text);
}

static void a_name_with_a_suffix_goes_to_the_loader(void **state)
{
    void *symbol;

    (void)state;
    refused(ferry__module_symbol("no-such-library.so.7", "s", &symbol),
            FERRY_EBACKEND, "no-such-library.so.7 cannot be opened");
    refused(ferry__module_symbol("no_such_module", "s", &symbol),
            FERRY_EBACKEND, "no_such_module.so is not installed");
}

static void one_is_opened_once_and_its_symbols_stay(void **state)
{
    const char *path = test_module("memory_worker");
    void *first, *second;

    (void)state;
    /* Memory that runs out at any place is said, and the next try works. */
    for (uint64_t n = 1; n <= 2; n++) {
        ferry__fault_arm(FERRY__FAULT_ALLOC, n);
        assert_int_equal(
            ferry__module_symbol(path, "ferry_worker_engine", &first),
            FERRY_ENOMEM);
        ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
    }
    assert_int_equal(ferry__module_symbol(path, "ferry_worker_engine", &first),
                     FERRY_OK);
    assert_int_equal(ferry__module_symbol(path, "ferry_worker_engine", &second),
                     FERRY_OK);
    assert_ptr_equal(first, second);
    refused(ferry__module_symbol(path, "no_such_symbol", &second),
            FERRY_EBACKEND, "no_such_symbol");
    assert_ptr_equal(first, second);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ours_are_beside_libferry_or_where_the_setting_says),
        cmocka_unit_test(paths_that_are_too_long_are_refused),
        cmocka_unit_test(a_name_with_a_suffix_goes_to_the_loader),
        cmocka_unit_test(one_is_opened_once_and_its_symbols_stay),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
