/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a host come to share a pool, with one of two ranks played
 * by hand so that the other waits: its owner, and what the group tells, end
 * that wait long before its bound (J1). */
#include "harness/stream_cases.h"

#include "base/bytes.h"
#include "base/clock.h"
#include "base/socket.h"
#include "base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define BOUND_MS 20000
/* Far from the bound, and far from what a loaded machine needs. */
#define SOON_MS 8000
/* As tcp_stream_share.c writes them. */
#define NAME_AT    36
#define KEY_AT     (NAME_AT + 48)
#define CARD_BYTES (KEY_AT + 32 + 160)
#define WORD_BYTES (8 + 160)
#define BUFFERS    2
#define BYTES      65536

typedef struct pair {
    comm_group group;
    int32_t real, root;
    _Atomic int64_t had_enough_ns; /* the owner's; 0: not yet */
    ferry_status status;
    char line[512];
    int64_t ended_ns;
} pair;

static ferry_status check(void *arg, const char *what)
{
    pair *p = arg;

    if (atomic_load(&p->had_enough_ns) == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_ECANCELED, "%s: the owner had enough", what);
}

static void *be_real(void *arg)
{
    pair *p = arg;
    ferry__stream_options o = {.root = p->root,
                               .n_buffers = BUFFERS,
                               .buffer_bytes = BYTES,
                               .timeout_ms = BOUND_MS};
    ferry__stream *s = NULL;
    ferry__comm *c = NULL;

    p->status = stream_group_one_host.open(&p->group, p->real, &c);
    if (p->status >= 0) {
        c->check = check;
        c->check_arg = p;
        p->status = ferry__stream_open(c, &o, &s);
    }
    snprintf(p->line, sizeof(p->line), "%s", ferry_last_error());
    p->ended_ns = ferry__now_ns();
    ferry__stream_close(&s);
    ferry__comm_close(&c);
    return NULL;
}

/* ---- the rank that is played by hand ---- */

static void gather(ferry__comm *c, const void *mine, size_t size)
{
    char all[2 * CARD_BYTES];

    assert_int_equal(c->ops->all_gather(c, mine, size, all, BOUND_MS),
                     FERRY_OK);
}

static void give_card(ferry__comm *c, int32_t root, const char *name)
{
    unsigned char card[CARD_BYTES] = {0};

    ferry__write_u32(card, 1);
    ferry__write_u32(card + 4, (uint32_t)root);
    ferry__write_u32(card + 8, BUFFERS);
    ferry__write_u32(card + 12, BYTES);
    memcpy(card + NAME_AT, name, strlen(name));
    gather(c, card, sizeof(card));
}

/* Says that it is connected, whether it is or not. */
static void give_word(ferry__comm *c)
{
    unsigned char word[WORD_BYTES] = {0};

    ferry__write_u32(word, 1);
    gather(c, word, sizeof(word));
}

static void begin(pair *p, int32_t real, pthread_t *thread, ferry__comm **out)
{
    memset(p, 0, sizeof(*p));
    p->real = real;
    assert_int_equal(stream_group_one_host.make(&p->group, 2, 0), FERRY_OK);
    assert_int_equal(ferry__thread_start(thread, "real", be_real, p), FERRY_OK);
    assert_int_equal(stream_group_one_host.open(&p->group, 1 - real, out),
                     FERRY_OK);
}

static void finish(pair *p, pthread_t thread, ferry__comm **c, int64_t from_ns)
{
    pthread_join(thread, NULL);
    ferry__comm_close(c);
    stream_group_one_host.drop(&p->group);
    if (p->ended_ns - from_ns > SOON_MS * INT64_C(1000000))
        fail_msg("it took %lld ms: %s",
                 (long long)((p->ended_ns - from_ns) / 1000000), p->line);
}

static void expect(const pair *p, ferry_status status, const char *words)
{
    if (p->status != status || !strstr(p->line, words))
        fail_msg("%s: %s", ferry_status_name(p->status), p->line);
}

/* A leader whose mate never asks for the pool. */
static void j1_an_owner_ends_the_wait_of_a_leader(void **state)
{
    pthread_t thread;
    ferry__comm *c;
    int64_t from;
    pair p;

    (void)state;
    begin(&p, 0, &thread, &c);
    give_card(c, 0, "");
    give_word(c);
    ferry__sleep_ms(50);
    from = ferry__now_ns();
    atomic_store(&p.had_enough_ns, from);
    finish(&p, thread, &c, from);
    expect(&p, FERRY_ECANCELED, "the owner had enough");
}

/* A rank whose leader takes its call and never answers. */
static int play_leader(ferry__comm *c)
{
    char name[48], random[17];
    int listener;

    assert_int_equal(ferry__random_hex(random, 8), FERRY_OK);
    snprintf(name, sizeof(name), "ferry-test-%s", random);
    assert_int_equal(ferry__unix_listen(name, &listener), FERRY_OK);
    give_card(c, 0, name);
    give_word(c);
    ferry__sleep_ms(50);
    return listener;
}

static void j1_an_owner_ends_the_wait_for_a_leader(void **state)
{
    pthread_t thread;
    ferry__comm *c;
    int64_t from;
    int listener;
    pair p;

    (void)state;
    begin(&p, 1, &thread, &c);
    listener = play_leader(c);
    from = ferry__now_ns();
    atomic_store(&p.had_enough_ns, from);
    finish(&p, thread, &c, from);
    close(listener);
    expect(&p, FERRY_ECANCELED, "the owner had enough");
}

static void j1_a_failure_ends_the_wait_for_a_leader(void **state)
{
    pthread_t thread;
    ferry__comm *c;
    int64_t from;
    int listener;
    pair p;

    (void)state;
    begin(&p, 1, &thread, &c);
    listener = play_leader(c);
    from = ferry__now_ns();
    (c->ops->fail)(c, FERRY_EIO, "the disk is full"); /* cmocka's is a macro */
    finish(&p, thread, &c, from);
    close(listener);
    expect(&p, FERRY_EPEER, "rank 0 failed before: the disk is full");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(j1_an_owner_ends_the_wait_of_a_leader),
        cmocka_unit_test(j1_an_owner_ends_the_wait_for_a_leader),
        cmocka_unit_test(j1_a_failure_ends_the_wait_for_a_leader),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
