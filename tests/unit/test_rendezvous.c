/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that meet through a store: the right ones, too many, too few, and
 * again after the last group is dead. */
#include "comm/rendezvous.h"
#include "comm/rendezvous_card.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define T     5000
#define RANKS 5

static ferry__store_server *server;
static int32_t port;

static int begin(void **state)
{
    (void)state;
    return ferry__store_serve("127.0.0.1", 0, &port, &server);
}

static int end(void **state)
{
    (void)state;
    ferry__store_server_close(&server);
    return 0;
}

typedef struct seat {
    ferry__rendezvous_tcp r;
    ferry_status status;
    char line[512];
    ferry__comm *c;
} seat;

static seat seat_of(int32_t rank, int32_t world, uint64_t generation,
                    int64_t timeout_ms)
{
    return (seat){.r = {.base = {rank, world, generation, timeout_ms},
                        .host = "127.0.0.1",
                        .advertise = "127.0.0.1",
                        .secret = "secret"}};
}

static void *sit(void *arg)
{
    seat *s = arg;
    ferry__store *store = NULL;

    s->status = ferry__store_open("127.0.0.1", port, T, &store);
    if (s->status >= 0)
        s->status = ferry__rendezvous_tcp_open(store, &s->r, &s->c);
    snprintf(s->line, sizeof(s->line), "%s",
             s->status < 0 ? ferry_last_error() : "");
    ferry__store_close(&store);
    return NULL;
}

static void sit_down(seat *seats, int n)
{
    pthread_t threads[RANKS];

    for (int i = 0; i < n; i++)
        assert_int_equal(
            ferry__thread_start(&threads[i], "seat", sit, &seats[i]), FERRY_OK);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
}

static void stand_up(seat *seats, int n)
{
    for (int i = 0; i < n; i++)
        ferry__comm_close(&seats[i].c);
}

/* O-18: dp = 2, tp = 2, offset 1. */
static void o18_ranks_are_unique_over_replicas(void **state)
{
    int32_t want = 1, rank;

    (void)state;
    for (int32_t dp = 0; dp < 2; dp++) {
        for (int32_t tp = 0; tp < 2; tp++) {
            assert_int_equal(ferry__rendezvous_rank(dp, 2, tp, 1, 5, &rank),
                             FERRY_OK);
            assert_int_equal(rank, want++);
        }
    }
    assert_int_equal(ferry__rendezvous_rank(2, 2, 0, 1, 5, &rank),
                     FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "rank 5, the world has 5"));
    assert_int_equal(ferry__rendezvous_rank(0, 2, 2, 1, 5, &rank),
                     FERRY_EINVAL);
    assert_int_equal(
        ferry__rendezvous_rank(INT32_MAX, INT32_MAX, 0, 1, 5, &rank),
        FERRY_EINVAL);
}

static void *talk(void *arg)
{
    seat *s = arg;
    int32_t x = s->r.base.rank + 1;

    s->status = s->c->ops->all_reduce(s->c, &x, 1, FERRY_DTYPE_I32,
                                      FERRY__REDUCE_SUM, T);
    if (s->status >= 0 && x != 15)
        s->status = FERRY_EDIGEST;
    return NULL;
}

static void all_ranks_meet_and_talk(void **state)
{
    pthread_t threads[RANKS];
    seat seats[RANKS];

    (void)state;
    for (int32_t r = 0; r < RANKS; r++)
        seats[r] = seat_of(r, RANKS, 1, T);
    sit_down(seats, RANKS);
    for (int32_t r = 0; r < RANKS; r++)
        assert_int_equal(seats[r].status, FERRY_OK);
    for (int32_t r = 0; r < RANKS; r++)
        ferry__thread_start(&threads[r], "talk", talk, &seats[r]);
    for (int32_t r = 0; r < RANKS; r++)
        pthread_join(threads[r], NULL);
    for (int32_t r = 0; r < RANKS; r++)
        assert_int_equal(seats[r].status, FERRY_OK);
    stand_up(seats, RANKS);
}

static void o18_duplicate_rank_is_named_to_all(void **state)
{
    static const int32_t ranks[RANKS] = {0, 1, 1, 3, 4};
    int64_t began = ferry__now_ns();
    seat seats[RANKS];

    (void)state;
    for (int i = 0; i < RANKS; i++)
        seats[i] = seat_of(ranks[i], RANKS, 1, T);
    sit_down(seats, RANKS);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(seats[i].status, FERRY_EEXIST);
        assert_non_null(strstr(seats[i].line, "rank 1 claimed twice"));
    }
    assert_true(ferry__now_ns() - began < INT64_C(3000000000));
}

static void missing_ranks_are_named_to_all(void **state)
{
    seat seats[3] = {seat_of(0, 5, 1, 300), seat_of(1, 5, 1, 300),
                     seat_of(3, 5, 1, 300)};

    (void)state;
    sit_down(seats, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(seats[i].status, FERRY_ETIMEOUT);
        assert_non_null(strstr(seats[i].line, "rank 2, 4 did not come"));
        assert_non_null(strstr(seats[i].line, "300 ms"));
    }
}

static void missing_rank_0_is_named(void **state)
{
    seat seats[1] = {seat_of(1, 2, 1, 200)};

    (void)state;
    sit_down(seats, 1);
    assert_int_equal(seats[0].status, FERRY_ETIMEOUT);
    assert_non_null(strstr(seats[0].line, "rank 0 did not begin"));
}

static void different_worlds_are_refused(void **state)
{
    seat seats[2] = {seat_of(0, 2, 1, 400), seat_of(1, 3, 1, 400)};

    (void)state;
    sit_down(seats, 2);
    assert_int_equal(seats[1].status, FERRY_EMISMATCH);
    assert_int_equal(seats[0].status, FERRY_ETIMEOUT);
}

static void different_secrets_are_refused(void **state)
{
    seat seats[2] = {seat_of(0, 2, 1, 400), seat_of(1, 2, 1, 400)};

    (void)state;
    seats[1].r.secret = "another";
    sit_down(seats, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(seats[i].status, FERRY_EAUTH);
        assert_non_null(strstr(seats[i].line, i == 0 ? "rank 1" : "rank 0"));
        assert_non_null(strstr(seats[i].line, "the secret is wrong"));
    }
}

/* ---- who can write the store, and does not know the secret ---- */

typedef void forger(ferry__store *s, const char *key, const char *card,
                    size_t size);

/* Rank 0 puts its card down; another one is there when rank 1 comes. */
static void meet_forged(forger *forge, ferry_status want, const char *text)
{
    seat seats[2] = {seat_of(0, 2, 1, T), seat_of(1, 2, 1, T)};
    static const char name[] = "ferry/1/rank/0/card";
    ferry__store *store = NULL;
    pthread_t thread;
    size_t size;
    void *card;

    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), FERRY_OK);
    assert_int_equal(ferry__thread_start(&thread, "seat", sit, &seats[0]),
                     FERRY_OK);
    assert_int_equal(ferry__store_get(store, name, T, &card, &size), FERRY_OK);
    assert_null(memmem(card, size, "secret", 6));
    forge(store, name, card, size);
    ferry__free(card);
    sit(&seats[1]);
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(seats[i].status, want);
        assert_non_null(strstr(seats[i].line, "rank 0"));
        assert_non_null(strstr(seats[i].line, text));
    }
    ferry__store_close(&store);
}

/* Another address, with the proof of the card that was there. */
static void take_over(ferry__store *s, const char *name, const char *card,
                      size_t size)
{
    static const char address[] = "2 1 4000 1 10.9.8.7";
    char forged[256];
    int n = snprintf(forged, sizeof(forged), "%s%s", address, card + size - 65);

    assert_int_equal(ferry__store_set(s, name, forged, (size_t)n), FERRY_OK);
}

/* The card of another rank, which is a right one in its own place. */
static void swap_cards(ferry__store *s, const char *name, const char *card,
                       size_t size)
{
    ferry__rendezvous other = {1, 2, 1, T, .secret = "secret"};
    ferry__str sealed = {0};

    (void)card;
    (void)size;
    assert_int_equal(ferry__card_seal(&other, "1 4000 1 ::1", 12, &sealed),
                     FERRY_OK);
    assert_int_equal(ferry__store_set(s, name, sealed.data, sealed.length),
                     FERRY_OK);
    ferry__str_free(&sealed);
}

static void write_old(ferry__store *s, const char *name, const char *card,
                      size_t size)
{
    static const char old[] = "1 77 4000 12 127.0.0.1";

    (void)card;
    (void)size;
    assert_int_equal(ferry__store_set(s, name, old, sizeof(old) - 1), FERRY_OK);
}

static void write_junk(ferry__store *s, const char *name, const char *card,
                       size_t size)
{
    (void)card;
    (void)size;
    assert_int_equal(ferry__store_set(s, name, "2 ", 2), FERRY_OK);
}

static void a_writer_of_the_store_takes_over_no_address(void **state)
{
    (void)state;
    meet_forged(take_over, FERRY_EAUTH, "the secret is wrong");
}

static void a_card_is_right_in_its_own_place_only(void **state)
{
    (void)state;
    meet_forged(swap_cards, FERRY_EAUTH, "the secret is wrong");
}

static void cards_of_other_versions_are_named(void **state)
{
    (void)state;
    meet_forged(write_old, FERRY_EVERSION, "protocol version 1, this is 2");
}

static void junk_for_a_card_is_refused(void **state)
{
    (void)state;
    meet_forged(write_junk, FERRY_EPEER, "is not readable");
}

/* As docs/protocol.md has it; the proof was made by another program. */
static void golden_card(void **state)
{
    static const char card[] = "77 4000 12 127.0.0.1";
    static const char want[] =
        "2 77 4000 12 127.0.0.1 "
        "b3e8cd3a1ce8038abc90f1d87fec96a8d888329946f43bbffb585f3d06c2c92b";
    ferry__rendezvous r = {1, 3, 7, T, .secret = "secret"};
    ferry__str sealed = {0};
    size_t size;

    (void)state;
    assert_int_equal(ferry__card_seal(&r, card, sizeof(card) - 1, &sealed),
                     FERRY_OK);
    assert_string_equal(sealed.data, want);
    size = sealed.length;
    assert_int_equal(ferry__card_open(&r, 1, sealed.data, &size), FERRY_OK);
    assert_string_equal(sealed.data, card);
    assert_int_equal(size, sizeof(card) - 1);
    ferry__str_free(&sealed);
}

/* O-14, O-19: groups that are never closed before the next one begins, some
 * of them failed; what they left in the store does not grow. */
static void o19_new_generations_do_not_wait_for_dead_ones(void **state)
{
    ferry__store *store = NULL;
    seat old[2] = {{.c = NULL}};
    int64_t keys = 0, now;

    (void)state;
    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), FERRY_OK);
    for (uint64_t g = 1; g <= 20; g++) {
        seat seats[2] = {seat_of(0, 2, g, T), seat_of(1, 2, g, T)};

        if (g % 5 == 3) {
            seats[0].r.base.timeout_ms = 60;
            sit_down(seats, 1); /* the other one died */
            assert_int_equal(seats[0].status, FERRY_ETIMEOUT);
            continue;
        }
        sit_down(seats, 2);
        assert_int_equal(seats[0].status, FERRY_OK);
        assert_int_equal(seats[1].status, FERRY_OK);
        stand_up(old, 2);
        memcpy(old, seats, sizeof(old));
        assert_int_equal(ferry__store_num_keys(store, &now), FERRY_OK);
        if (g > 1)
            assert_int_equal(now, keys);
        keys = now;
    }
    stand_up(old, 2);
    /* One that slept through it is told. */
    old[0] = seat_of(1, 2, 4, T);
    sit_down(old, 1);
    assert_int_equal(old[0].status, FERRY_EORDER);
    assert_non_null(strstr(old[0].line, "generation 4 is over"));
    ferry__store_close(&store);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, end)
    const struct CMUnitTest tests[] = {
        CASE(o18_ranks_are_unique_over_replicas),
        CASE(all_ranks_meet_and_talk),
        CASE(o18_duplicate_rank_is_named_to_all),
        CASE(missing_ranks_are_named_to_all),
        CASE(missing_rank_0_is_named),
        CASE(different_worlds_are_refused),
        CASE(different_secrets_are_refused),
        CASE(a_writer_of_the_store_takes_over_no_address),
        CASE(a_card_is_right_in_its_own_place_only),
        CASE(cards_of_other_versions_are_named),
        CASE(junk_for_a_card_is_refused),
        CASE(golden_card),
        CASE(o19_new_generations_do_not_wait_for_dead_ones),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
