/* SPDX-License-Identifier: Apache-2.0 */
/* J5: each public struct that carries its size is accepted as an older
 * program compiled it. Every short struct ends where a page ends and the next
 * page cannot be read, so a field beyond its size is never looked at. */
#include "harness/fleet.h"
#include <ferry/backend.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "harness/expect.h"

#define END_OF(type, field) (offsetof(type, field) + sizeof(((type *)0)->field))

/* ---- structs that end at a wall ---- */

#define WALLS_MAX 64
static struct wall {
    void *pages;
    size_t size_bytes;
} walls[WALLS_MAX];
static size_t n_walls;

/* `size` bytes of `from`, the last one just before a page that cannot be
 * touched. The first field is set to `size`. */
static void *at_wall(const void *from, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t room = (size + page - 1) / page * page;
    char *pages = mmap(NULL, room + page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = pages + room - size;

    assert_true(pages != MAP_FAILED && n_walls < WALLS_MAX);
    assert_int_equal(mprotect(pages + room, page, PROT_NONE), 0);
    memcpy(at, from, size);
    memcpy(at, &size, sizeof(size));
    walls[n_walls++] = (struct wall){pages, room + page};
    return at;
}

static int drop_walls(void **state)
{
    (void)state;
    while (n_walls > 0) {
        n_walls--;
        munmap(walls[n_walls].pages, walls[n_walls].size_bytes);
    }
    return 0;
}

/* ---- one toy round over whatever is short ---- */

static void open_toy(fleet *f)
{
    fleet_options o = {.backend = "memory", .toy = {.kind = TOY_A}};

    fleet_open(f, &o);
}

static void round_works(fleet *f, const ferry_source *source, uint32_t seed)
{
    const char *why;

    ok(fleet_connect(f, source));
    ok(fleet_send(f, seed, NULL));
    why = fleet_differs(f, seed);
    if (why != NULL)
        fail_msg("%s", why);
}

static void client_tables(void **state)
{
    static const size_t sizes[] = {
        offsetof(ferry_client_ops, cancel),
        offsetof(ferry_client_ops, start_draft_weight_update),
        offsetof(ferry_client_ops, pause),
        offsetof(ferry_client_ops, status),
        offsetof(ferry_client_ops, prepare_weight_update),
        offsetof(ferry_client_ops, close),
        offsetof(ferry_client_ops, peer),
    };

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int fanned = 0; fanned < 2; fanned++) {
            ferry_client whole, short_one;
            fleet f;

            open_toy(&f);
            whole = short_one = f.client;
            short_one.ops = at_wall(whole.ops, sizes[i]);
            f.client = short_one;
            if (fanned)
                ok(ferry_client_fanout(&short_one, 1, &f.client));
            round_works(&f, NULL, (uint32_t)i + 1);
            ferry_trainer_shutdown(&f.trainer);
            ferry_client_close(&f.client);
            /* A table without close frees nothing; the test does. */
            if (sizes[i] < END_OF(ferry_client_ops, close))
                ferry_client_close(&whole);
            fleet_close(&f);
        }
    }
}

static void source_tables(void **state)
{
    static const size_t sizes[] = {offsetof(ferry_source_ops, close),
                                   offsetof(ferry_source_ops, holds),
                                   offsetof(ferry_source_ops, groups)};

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int adapted = 0; adapted < 2; adapted++) {
            const char *from = "nothing.", *to = "nothing.";
            ferry_source whole, source;
            fleet f;

            open_toy(&f);
            whole = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count);
            source = whole;
            source.ops = at_wall(whole.ops, sizes[i]);
            if (adapted)
                ok(ferry_source_rename(&source, &from, &to, 1, &source));
            round_works(&f, &source, (uint32_t)i + 1);
            fleet_close(&f);
            if (sizes[i] < END_OF(ferry_source_ops, close))
                ferry_source_close(&whole);
        }
    }
}

static void worker_options(void **state)
{
    static const size_t sizes[] = {
        offsetof(ferry_worker_options, commit),
        offsetof(ferry_worker_options, has_weights),
        offsetof(ferry_worker_options, tp_size),
        offsetof(ferry_worker_options, held_limit_bytes),
        offsetof(ferry_worker_options, deadline_ms),
        offsetof(ferry_worker_options, no_progress_ms),
    };
    ferry_worker_options full = FERRY_WORKER_OPTIONS_INIT("memory");
    toy_options to = {.kind = TOY_A};

    (void)state;
    fleet_register();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        toy *t = toy_create(&to);
        ferry_worker *w = NULL;

        ok(ferry_worker_create(at_wall(&full, sizes[i]), toy_model(t), NULL,
                               &w));
        ok(ferry_worker_start_weight_update(w));
        ok(ferry_worker_finish_weight_update(w, NULL));
        ferry_worker_destroy(&w);
        toy_free(t);
    }
}

static void model_tables(void **state)
{
    static const size_t sizes[] = {offsetof(ferry_model, checkpoint_name),
                                   offsetof(ferry_model, checkpoint_meta)};
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("memory");
    toy_options to = {.kind = TOY_A};

    (void)state;
    fleet_register();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        toy *t = toy_create(&to);
        toy_checkpoint *c = toy_checkpoint_create(&to);
        ferry_source source = toy_checkpoint_source(c, 0, c->count);
        ferry_worker *w = NULL;

        toy_checkpoint_fill(c, 3);
        ok(ferry_worker_create(&o, at_wall(toy_model(t), sizes[i]), NULL, &w));
        ok(ferry_worker_load_source(w, &source));
        assert_null(toy_differs(t, 3));
        ferry_source_close(&source);
        ferry_worker_destroy(&w);
        toy_checkpoint_free(c);
        toy_free(t);
    }
}

static void send_options_and_stats(void **state)
{
    static const size_t sizes[] = {
        offsetof(ferry_send_options, weight_version),
        offsetof(ferry_send_options, payload),
        offsetof(ferry_send_options, draft),
        offsetof(ferry_send_options, progress),
        offsetof(ferry_send_options, stats),
    };
    ferry_send_options full = FERRY_SEND_OPTIONS_INIT;
    ferry_round_stats stats, zero;
    fleet f;

    (void)state;
    open_toy(&f);
    round_works(&f, NULL, 1);
    full.weight_version = "v2";
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        ok(ferry_trainer_send_weights(f.trainer, at_wall(&full, sizes[i])));
    assert_string_equal(fleet_status(f.workers[0], "weight_version"), "v2");

    /* Stats are written as far as the caller's struct goes. */
    memset(&zero, 0, sizeof(zero));
    full.stats = at_wall(&zero, offsetof(ferry_round_stats, bytes_sent));
    ok(ferry_trainer_send_weights(f.trainer, &full));
    memset(&stats, 0, sizeof(stats));
    memcpy(&stats, full.stats, offsetof(ferry_round_stats, bytes_sent));
    assert_int_equal(stats.n_params, f.checkpoint->count);
    assert_true(stats.bytes_declared > 0);
    fleet_close(&f);
}

static void http_options(void **state)
{
    static const size_t sizes[] = {
        offsetof(ferry_http_options, token),
        offsetof(ferry_http_options, timeout_ms),
        offsetof(ferry_http_options, connect_timeout_ms),
        offsetof(ferry_http_options, proxy),
        offsetof(ferry_http_options, ca_file),
        offsetof(ferry_http_options, pause),
    };
    ferry_http_options full = FERRY_HTTP_OPTIONS_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        ferry_client c = {NULL, NULL};

        ok(ferry_client_http("http://127.0.0.1:1", at_wall(&full, sizes[i]),
                             &c));
        ferry_client_close(&c);
    }
}

static void backend_info(void **state)
{
    ferry_backend_info full, *out;

    (void)state;
    memset(&full, 0, sizeof(full));
    out = at_wall(&full, offsetof(ferry_backend_info, reason));
    ok(ferry_trainer_list(0, out));
    assert_int_equal(out->size, offsetof(ferry_backend_info, reason));
    assert_string_equal(out->name, "nccl");
    assert_int_equal(out->built_in, 1);
    ok(ferry_worker_list(0, out));
    assert_string_equal(out->name, "nccl");
}

/* The init info of a program that knew nothing but the head. */
static void init_info(void **state)
{
    ferry_ipc_trainer_init_info full = FERRY_IPC_TRAINER_INIT_INFO(1);
    ferry_trainer *trainer = NULL;
    fleet f;

    (void)state;
    if (fleet_unavailable("ipc") != NULL)
        skip();
    open_toy(&f);
    f.source = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count);
    ok(ferry_trainer_init(at_wall(&full, sizeof(full.base)), &f.client,
                          &f.source, &trainer));
    ferry_trainer_shutdown(&trainer);
    ok(ferry_trainer_init(
        at_wall(&full, offsetof(ferry_ipc_trainer_init_info, path)), &f.client,
        &f.source, &trainer));
    ferry_trainer_shutdown(&trainer);
    fleet_close(&f);
}

/* Engines of this ABI's first layout, registered directly. */
static void engine_tables(void **state)
{
    const ferry_trainer_engine_ops *t;
    const ferry_worker_engine_ops *w;

    (void)state;
    fleet_register();
    ok(ferry_trainer_find("memory", &t));
    ok(ferry_worker_find("memory", &w));
    ok(ferry_trainer_register(
        "old-engine", at_wall(t, END_OF(ferry_trainer_engine_ops, destroy))));
    ok(ferry_worker_register(
        "old-engine", at_wall(w, END_OF(ferry_worker_engine_ops, destroy))));
    assert_int_equal(
        ferry_trainer_register(
            "too-short",
            at_wall(t, offsetof(ferry_trainer_engine_ops, destroy))),
        FERRY_EINVAL);
    assert_int_equal(
        ferry_worker_register(
            "too-short",
            at_wall(w, offsetof(ferry_worker_engine_ops, destroy))),
        FERRY_EINVAL);
}

/* Too short to be anything: refused with both sizes, not read. */
static void nothing_but_a_size(void **state)
{
    size_t only = sizeof(size_t);
    ferry_worker_options wo = FERRY_WORKER_OPTIONS_INIT("memory");
    ferry_ipc_trainer_init_info ii = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_backend_info bi = {.size = sizeof(bi)};
    toy_options to = {.kind = TOY_A};
    toy *t = toy_create(&to);
    ferry_worker *w = NULL;
    ferry_trainer *trainer = NULL;
    ferry_source source;
    ferry_client client;
    fleet f;

    (void)state;
    open_toy(&f);
    assert_int_equal(
        ferry_worker_create(at_wall(&wo, only), toy_model(t), NULL, &w),
        FERRY_EINVAL);
    assert_int_equal(
        ferry_worker_create(&wo, at_wall(toy_model(t), only), NULL, &w),
        FERRY_EINVAL);
    assert_int_equal(ferry_trainer_list(0, at_wall(&bi, only)), FERRY_EINVAL);
    source = toy_checkpoint_source(f.checkpoint, 0, f.checkpoint->count);
    assert_int_equal(ferry_trainer_init(at_wall(&ii, 2 * only), &f.client,
                                        &source, &trainer),
                     FERRY_EINVAL);
    client = f.client;
    client.ops = at_wall(f.client.ops, only);
    assert_int_equal(ferry_trainer_init_dict("memory", "{\"rank\":0}", &client,
                                             &source, &trainer),
                     FERRY_EINVAL);
    ferry_source_close(&source);
    fleet_close(&f);
    toy_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(client_tables, drop_walls),
        cmocka_unit_test_teardown(source_tables, drop_walls),
        cmocka_unit_test_teardown(worker_options, drop_walls),
        cmocka_unit_test_teardown(model_tables, drop_walls),
        cmocka_unit_test_teardown(send_options_and_stats, drop_walls),
        cmocka_unit_test_teardown(http_options, drop_walls),
        cmocka_unit_test_teardown(backend_info, drop_walls),
        cmocka_unit_test_teardown(init_info, drop_walls),
        cmocka_unit_test_teardown(nothing_but_a_size, drop_walls),
        /* Last: registered tables stay for the life of the process. */
        cmocka_unit_test(engine_tables),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
