/* SPDX-License-Identifier: Apache-2.0 */
/* The two factories: F1, F2, A2, F4 and what a table must have. */
#include <ferry/backend.h>
#include <ferry/registry.h>

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/config.h"

static const char *module_path(const char *name)
{
    static _Thread_local char path[4096];
    const char *folder = getenv("FERRY_TEST_MODULES");

    snprintf(path, sizeof(path), "%s/%s.so",
             folder != NULL ? folder : "tests/modules", name);
    return path;
}

/* Copies a good table, for tests that spoil one field. */
static ferry_trainer_engine_ops trainer_ops(void)
{
    const ferry_trainer_engine_ops *ops;

    ferry_trainer_register_lazy("memory", module_path("memory_trainer"), NULL);
    assert_int_equal(ferry_trainer_find("memory", &ops), 0);
    return *ops;
}

static ferry_worker_engine_ops worker_ops(void)
{
    const ferry_worker_engine_ops *ops;

    ferry_worker_register_lazy("memory", module_path("memory_worker"), NULL);
    assert_int_equal(ferry_worker_find("memory", &ops), 0);
    return *ops;
}

/* F2: the built-ins are known from the start, in this order, on both sides;
 * one that is not installed says so. */
static void f2_built_ins_are_listed_with_a_reason(void **state)
{
    static const char *const names[] = {"nccl", "ipc", "sparse_nccl",
                                        "sharded_rdt"};
    ferry_backend_info info = {.size = sizeof(info)};
    char old[4096];

    (void)state;
    snprintf(old, sizeof(old), "%s",
             ferry__config_get(FERRY__CONFIG_MODULE_PATH));
    assert_int_equal(ferry__config_set("module_path", "/nowhere"), 0);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(ferry_trainer_list(i, &info), 0);
        assert_string_equal(info.name, names[i]);
        assert_int_equal(info.built_in, 1);
        assert_int_equal(info.available, 0);
        assert_non_null(strstr(info.reason, "_trainer.so is not installed"));
        assert_int_equal(ferry_worker_list(i, &info), 0);
        assert_string_equal(info.name, names[i]);
        assert_non_null(strstr(info.reason, "_worker.so is not installed"));
    }
    assert_int_equal(ferry__config_set("module_path", old), 0);
    info.size = 8;
    assert_int_equal(ferry_trainer_list(0, &info), FERRY_EINVAL);
    info.size = sizeof(info);
    assert_int_equal(ferry_trainer_list(1000, &info), FERRY_DONE);
}

static void f1_unknown_backend_lists_the_known(void **state)
{
    const ferry_trainer_engine_ops *ops;

    (void)state;
    assert_int_equal(ferry_trainer_find("nope", &ops), FERRY_EUNKNOWN);
    assert_non_null(strstr(ferry_last_error(),
                           "backend 'nope' is unknown; known: nccl, ipc, "
                           "sparse_nccl, sharded_rdt"));
    assert_int_equal(ferry_trainer_find(NULL, &ops), FERRY_EINVAL);
}

static void f1_missing_file_and_symbol_are_said_each_time(void **state)
{
    const ferry_worker_engine_ops *ops;

    (void)state;
    assert_int_equal(
        ferry_worker_register_lazy("no_file", "/nowhere/engine.so", NULL), 0);
    assert_int_equal(ferry_worker_register_lazy("no_symbol",
                                                module_path("memory_worker"),
                                                "no_such_entry"),
                     0);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(ferry_worker_find("no_file", &ops), FERRY_EBACKEND);
        assert_non_null(strstr(ferry_last_error(), "/nowhere/engine.so"));
        assert_int_equal(ferry_worker_find("no_symbol", &ops), FERRY_EBACKEND);
        assert_non_null(strstr(ferry_last_error(), "no_such_entry"));
    }
    assert_int_equal(
        ferry_worker_register_lazy("bare", "ferry_bare_worker", NULL), 0);
    assert_int_equal(ferry_worker_find("bare", &ops), FERRY_EBACKEND);
    assert_non_null(strstr(ferry_last_error(),
                           "module ferry_bare_worker.so is not installed"));
}

static void f1_lazy_availability_is_told_without_loading(void **state)
{
    ferry_backend_info info = {.size = sizeof(info)};
    size_t i = 0;
    int seen = 0;

    (void)state;
    ferry_worker_register_lazy("by_loader", "libnowhere_engine.so", NULL);
    for (; ferry_worker_list(i, &info) == FERRY_OK; i++) {
        if (strcmp(info.name, "no_file") == 0) {
            assert_int_equal(info.available, 0);
            assert_non_null(strstr(info.reason, "is not there"));
            seen++;
        }
        if (strcmp(info.name, "no_symbol") == 0) {
            assert_int_equal(info.available, 1);
            seen++;
        }
        if (strcmp(info.name, "by_loader") == 0) {
            assert_int_equal(info.available, 0);
            assert_non_null(strstr(info.reason, "when first used"));
            seen++;
        }
    }
    assert_int_equal(seen, 3);
}

static void f1_repeated_and_bad_names_are_refused(void **state)
{
    static ferry_trainer_engine_ops ops;
    char long_name[80];

    (void)state;
    ops = trainer_ops();
    assert_int_equal(ferry_trainer_register("ipc", &ops), FERRY_EEXIST);
    assert_string_equal(ferry_last_error(),
                        "backend 'ipc' is already registered");
    assert_int_equal(ferry_trainer_register_lazy("nccl", "x.so", NULL),
                     FERRY_EEXIST);
    assert_int_equal(ferry_trainer_register("", &ops), FERRY_EINVAL);
    assert_int_equal(ferry_trainer_register(NULL, &ops), FERRY_EINVAL);
    assert_int_equal(ferry_trainer_register("null", NULL), FERRY_EINVAL);
    assert_int_equal(ferry_trainer_register_lazy("null", "", NULL),
                     FERRY_EINVAL);
    memset(long_name, 'x', sizeof(long_name) - 1);
    long_name[sizeof(long_name) - 1] = '\0';
    assert_int_equal(ferry_trainer_register(long_name, &ops), FERRY_EINVAL);
}

/* A2: a name on one side says nothing about the other. */
static void a2_the_two_sides_share_nothing(void **state)
{
    static ferry_trainer_engine_ops ops;
    const ferry_worker_engine_ops *found;
    const ferry_trainer_engine_ops *mine;

    (void)state;
    ops = trainer_ops();
    assert_int_equal(ferry_trainer_register("one_sided", &ops), 0);
    assert_int_equal(ferry_trainer_find("one_sided", &mine), 0);
    assert_ptr_equal(mine, &ops);
    assert_int_equal(ferry_worker_find("one_sided", &found), FERRY_EUNKNOWN);
}

static void j5_another_abi_is_refused_with_both_versions(void **state)
{
    static ferry_trainer_engine_ops t;
    static ferry_worker_engine_ops w;

    (void)state;
    t = trainer_ops();
    t.abi = 0x00020003u;
    assert_int_equal(ferry_trainer_register("abi", &t), FERRY_EVERSION);
    assert_non_null(strstr(ferry_last_error(), "2.3"));
    assert_non_null(strstr(ferry_last_error(), "1.0"));
    t.abi = FERRY_ENGINE_ABI | 7; /* a minor version is no obstacle */
    assert_int_equal(ferry_trainer_register("abi_minor", &t), 0);
    w = worker_ops();
    w.abi = 0;
    assert_int_equal(ferry_worker_register("abi", &w), FERRY_EVERSION);
}

static void a_table_without_a_method_is_refused_by_name(void **state)
{
    static ferry_trainer_engine_ops t;
    static ferry_worker_engine_ops w;

    (void)state;
#define REFUSED(side, table, good, field)                                      \
    table = good;                                                              \
    table.field = NULL;                                                        \
    assert_int_equal(ferry_##side##_register("spoilt", &table), FERRY_EINVAL); \
    assert_non_null(strstr(ferry_last_error(), "has no " #field))
    REFUSED(trainer, t, trainer_ops(), init_type);
    REFUSED(trainer, t, trainer_ops(), create);
    REFUSED(trainer, t, trainer_ops(), send);
    REFUSED(trainer, t, trainer_ops(), destroy);
    REFUSED(worker, w, worker_ops(), init_info);
    REFUSED(worker, w, worker_ops(), update_info);
    REFUSED(worker, w, worker_ops(), create);
    REFUSED(worker, w, worker_ops(), init_transfer_engine);
    REFUSED(worker, w, worker_ops(), start_weight_update);
    REFUSED(worker, w, worker_ops(), receive_weights);
    REFUSED(worker, w, worker_ops(), finish_weight_update);
    REFUSED(worker, w, worker_ops(), shutdown);
    REFUSED(worker, w, worker_ops(), destroy);
#undef REFUSED
    t = trainer_ops();
    t.size = 16;
    assert_int_equal(ferry_trainer_register("spoilt", &t), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "16 bytes"));
}

static void *find_and_register(void *arg)
{
    const ferry_trainer_engine_ops *ops;
    char name[32];

    for (int i = 0; i < 50; i++) {
        snprintf(name, sizeof(name), "thread_%d_%d", (int)(intptr_t)arg, i);
        assert_int_equal(ferry_trainer_register_lazy(
                             name, module_path("memory_trainer"), NULL),
                         0);
        assert_int_equal(ferry_trainer_find(name, &ops), 0);
    }
    return NULL;
}

static void any_thread_may_register_and_find(void **state)
{
    pthread_t threads[3];

    (void)state;
    for (intptr_t i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, find_and_register, (void *)i);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f2_built_ins_are_listed_with_a_reason),
        cmocka_unit_test(f1_unknown_backend_lists_the_known),
        cmocka_unit_test(f1_missing_file_and_symbol_are_said_each_time),
        cmocka_unit_test(f1_lazy_availability_is_told_without_loading),
        cmocka_unit_test(f1_repeated_and_bad_names_are_refused),
        cmocka_unit_test(a2_the_two_sides_share_nothing),
        cmocka_unit_test(j5_another_abi_is_refused_with_both_versions),
        cmocka_unit_test(a_table_without_a_method_is_refused_by_name),
        cmocka_unit_test(any_thread_may_register_and_find),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
