/* SPDX-License-Identifier: Apache-2.0 */
/* Who may join a tcp group, and who may pull from it: strangers, impostors
 * and peers by hand. */
#include "base/bytes.h"
#include "base/clock.h"
#include "base/thread.h"
#include "comm/tcp_address.h"
#include "comm/tcp_proof.h"
#include "harness/tcp_seats.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define T TCP_SEATS_MS

/* ---- strangers ---- */

static void strangers_are_refused_and_the_group_still_forms(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "stranger"};
    unsigned char junk[104] = "GET / HTTP/1.1\r\n\r\n";
    pthread_t first;
    comm_group g;
    int fds[3];

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    assert_int_equal(ferry__thread_start(&first, "seat", tcp_sit, &seats[0]),
                     FERRY_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(
            ferry__tcp_connect("127.0.0.1", g.ports[0], &w, &fds[i]), FERRY_OK);
        if (i < 2)
            assert_int_equal(
                ferry__send_all(fds[i], junk, i ? 3 : sizeof(junk), &w),
                FERRY_OK);
    }
    /* The first is told no and cut off; it sees nothing of the group. */
    assert_int_equal(ferry__recv_all(fds[0], junk, sizeof(junk), &w), FERRY_OK);
    assert_memory_equal(junk, "FNO!", 4);
    assert_null(memmem(junk, sizeof(junk), tcp_seats_secret, 8));
    tcp_sit(&seats[1]);
    pthread_join(first, NULL);
    assert_int_equal(seats[0].status, FERRY_OK);
    assert_int_equal(seats[1].status, FERRY_OK);
    for (int i = 0; i < 3; i++)
        close(fds[i]);
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

static void count_refusals(ferry_log_level level, const char *line, void *arg)
{
    if (level == FERRY_LOG_WARN && strstr(line, "a connection is refused"))
        atomic_fetch_add((atomic_int *)arg, 1);
}

/* J3: strangers get a line a second, however many they are. */
static void the_log_of_strangers_is_bounded(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    int64_t from_ns = ferry__now_ns(), seconds;
    atomic_int n_lines = 0;
    pthread_t first;
    comm_group g;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    ferry_log_set(count_refusals, &n_lines);
    assert_int_equal(ferry__thread_start(&first, "seat", tcp_sit, &seats[0]),
                     FERRY_OK);
    for (int i = 0; i < 100; i++) {
        ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "stranger"};
        unsigned char no[104];
        int fd;

        assert_int_equal(ferry__tcp_connect("127.0.0.1", g.ports[0], &w, &fd),
                         FERRY_OK);
        assert_int_equal(ferry__send_all(fd, "GET / HTTP/1.1", 14, &w),
                         FERRY_OK);
        assert_int_equal(ferry__recv_all(fd, no, sizeof(no), &w), FERRY_OK);
        close(fd);
    }
    tcp_sit(&seats[1]);
    pthread_join(first, NULL);
    ferry_log_set(NULL, NULL);
    seconds = (ferry__now_ns() - from_ns) / 1000000000 + 1;
    assert_int_equal(seats[0].status, FERRY_OK);
    assert_in_range(atomic_load(&n_lines), 2, 1 + seconds);
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

static void keep_line(ferry_log_level level, const char *line, void *arg)
{
    char *lines = arg;

    if (level == FERRY_LOG_WARN && strlen(lines) + strlen(line) + 2 < 1024)
        strcat(strcat(lines, line), "\n");
}

/* J3: who says nothing, or stops within a message, is told of as well. */
static void silent_strangers_are_told_of(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "stranger"};
    char lines[1024] = "";
    pthread_t first;
    comm_group g;
    int fds[2];

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    ferry_log_set(keep_line, lines);
    for (int i = 0; i < 2; i++)
        assert_int_equal(
            ferry__tcp_connect("127.0.0.1", g.ports[0], &w, &fds[i]), FERRY_OK);
    assert_int_equal(ferry__send_all(fds[0], "FTC", 3, &w), FERRY_OK);
    close(fds[0]);
    assert_int_equal(ferry__thread_start(&first, "seat", tcp_sit, &seats[0]),
                     FERRY_OK);
    tcp_sit(&seats[1]);
    pthread_join(first, NULL);
    ferry_log_set(NULL, NULL);
    assert_int_equal(seats[0].status, FERRY_OK);
    assert_non_null(strstr(lines, "rank 0: a connection is refused: it ended "
                                  "after 3 of 104 bytes of its hello"));
    /* The second one within a second is counted. */
    assert_non_null(strstr(lines, "a connection is refused: 1 more"));
    close(fds[1]);
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

static void refuse_one(tcp_wishes other, ferry_status want, const char *text)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    comm_group g;

    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    seats[0].w.timeout_ms = 400;
    seats[1].w = other;
    tcp_sit_down(seats, 2);
    assert_int_equal(seats[1].status, want);
    if (!strstr(seats[1].line, text))
        fail_msg("'%s' is not in '%s'", text, seats[1].line);
    assert_int_equal(seats[0].status, FERRY_ETIMEOUT);
    assert_non_null(strstr(seats[0].line, "rank 1 did not connect"));
    tcp_seats_drop(&g);
}

static void wrong_peers_are_told_why(void **state)
{
    (void)state;
    refuse_one((tcp_wishes){.secret = "guess"}, FERRY_EPEER,
               "the secret is wrong");
    refuse_one((tcp_wishes){.generation = 7}, FERRY_EPEER,
               "generation 7, this is 0");
    refuse_one((tcp_wishes){.world_size = 3}, FERRY_EPEER,
               "world size 3, this is 2");
}

/* ---- a peer by hand ---- */

static const tcp__identity first = {.rank = 0, .world_size = 2};
static const tcp__identity second = {.rank = 1, .world_size = 2};

static tcp__identity with(const tcp__identity *id, const char *s)
{
    tcp__identity made = *id;

    snprintf(made.secret, sizeof(made.secret), "%s", s);
    return made;
}

static void send_message(int fd, const tcp__proof_message m)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "by hand"};

    assert_int_equal(ferry__send_all(fd, m, TCP__PROOF_BYTES, &w), FERRY_OK);
}

/* False when the connection is closed instead. */
static bool take_message(int fd, tcp__proof_message m)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "by hand"};

    return ferry__recv_all(fd, m, TCP__PROOF_BYTES, &w) == FERRY_OK;
}

static int call_port(int32_t port)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "by hand"};
    int fd = -1;

    assert_int_equal(ferry__tcp_connect("127.0.0.1", port, &w, &fd), FERRY_OK);
    return fd;
}

static int take_call(int listener)
{
    ferry__deadline until = ferry__deadline_in(T);
    int fd = -1;

    while (ferry__tcp_accept(listener, &fd) != FERRY_OK) {
        assert_false(ferry__deadline_passed(&until));
        ferry__sleep_ms(1);
    }
    return fd;
}

/* What rank 1 would say to rank 0; true when it was welcomed. */
static bool shake_by_hand(int fd, const tcp__identity *id, uint32_t channel,
                          tcp__proof_message hello, tcp__proof_message proof)
{
    tcp__proof_message answer;
    tcp__proof p;

    assert_int_equal(ferry__tcp_proof_call(&p, 0, channel), FERRY_OK);
    ferry__tcp_proof_write(&p, id, TCP__HELLO, hello);
    send_message(fd, hello);
    assert_true(take_message(fd, answer));
    assert_int_equal(ferry__tcp_proof_read(&p, id, TCP__CHALLENGE, answer),
                     FERRY_OK);
    ferry__tcp_proof_write(&p, id, TCP__PROOF, proof);
    send_message(fd, proof);
    return take_message(fd, answer) &&
           ferry__tcp_proof_read(&p, id, TCP__WELCOME, answer) == FERRY_OK;
}

static void start_seat(comm_group *g, tcp_seat *s, pthread_t *thread)
{
    s->group = g;
    assert_int_equal(ferry__thread_start(thread, "seat", tcp_sit, s), FERRY_OK);
}

/* All that a rank said on one connection opens no other one. */
static void replayed_transcript_is_refused(void **state)
{
    tcp__proof_message hello, proof, answer;
    tcp__identity id = with(&second, tcp_seats_secret);
    tcp_seat seats[3] = {
        {.rank = 0, .w.timeout_ms = 500}, {.rank = 0}, {.rank = 1}};
    pthread_t thread;
    comm_group g;
    int fd;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    start_seat(&g, &seats[0], &thread);
    fd = call_port(g.ports[0]);
    assert_true(shake_by_hand(fd, &id, 0, hello, proof));
    pthread_join(thread, NULL);
    close(fd);
    assert_null(memmem(hello, sizeof(hello), tcp_seats_secret, 8));
    assert_null(memmem(proof, sizeof(proof), tcp_seats_secret, 8));

    start_seat(&g, &seats[1], &thread);
    fd = call_port(g.ports[0]);
    send_message(fd, hello);
    assert_true(take_message(fd, answer));
    assert_memory_equal(answer, "FTCP", 4);
    send_message(fd, proof);
    assert_true(take_message(fd, answer));
    assert_memory_equal(answer, "FNO!", 4);
    assert_non_null(strstr((char *)answer + 8, "the secret is wrong"));
    assert_false(take_message(fd, answer));
    close(fd);
    /* The right one is still awaited, and comes. */
    seats[2].group = &g;
    tcp_sit(&seats[2]);
    pthread_join(thread, NULL);
    assert_int_equal(seats[1].status, FERRY_OK);
    assert_int_equal(seats[2].status, FERRY_OK);
    ferry__comm_close(&seats[1].c);
    ferry__comm_close(&seats[2].c);
    tcp_seats_drop(&g);
}

/* Who took over the address of rank 0 without knowing the secret. */
typedef enum trick { REFLECT, GUESS, OLD, HALF, SILENT } trick;

/* Up to the challenge, on one of the connections. */
static void play_challenge(int fd, trick t, tcp__proof *p)
{
    tcp__identity id = with(&first, "guess");
    tcp__proof_message m;

    assert_true(take_message(fd, m));
    assert_null(memmem(m, sizeof(m), tcp_seats_secret, 8));
    assert_int_equal(ferry__tcp_proof_answer(p, &id, m), FERRY_OK);
    if (t == REFLECT)
        memcpy(p->mine, p->theirs, sizeof(p->mine));
    ferry__tcp_proof_write(p, &id, TCP__CHALLENGE, m);
    if (t == HALF)
        assert_true(write(fd, m, sizeof(m) / 2) > 0);
    else
        send_message(fd, m);
}

static void play_rank_0(const int *fds, trick t)
{
    static const tcp__proof_message old =
        "FNO!\0\0\0\0protocol version 2, this is 1";
    tcp__identity id = with(&first, "guess");
    tcp__proof proofs[3];
    tcp__proof_message m;

    if (t == OLD)
        send_message(fds[0], old);
    if (t == OLD || t == SILENT) {
        assert_true(take_message(fds[0], m));
        return;
    }
    for (int i = 0; i < (t == HALF ? 1 : 3); i++)
        play_challenge(fds[i], t, &proofs[i]);
    if (t == HALF)
        return;
    assert_true(take_message(fds[0], m));
    assert_null(memmem(m, sizeof(m), tcp_seats_secret, 8));
    if (t == REFLECT) {
        ferry__write_u32(m + 20, 0);
        ferry__write_u32(m + 24, 1);
        ferry__write_u32(m + 32, TCP__WELCOME);
    } else {
        ferry__tcp_proof_write(&proofs[0], &id, TCP__WELCOME, m);
    }
    send_message(fds[0], m);
}

static void meet_impostor(trick t, ferry_status want, const char *text)
{
    tcp_seat s = {.rank = 1, .w.timeout_ms = t == SILENT ? 300 : T};
    int64_t began = ferry__now_ns();
    pthread_t thread;
    comm_group g;
    int fds[3];
    tcp__proof_message m;

    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    start_seat(&g, &s, &thread);
    for (int i = 0; i < 3; i++)
        fds[i] = take_call(g.fds[0]);
    play_rank_0(fds, t);
    if (t == HALF)
        close(fds[0]);
    pthread_join(thread, NULL);
    if (s.status != want || !strstr(s.line, text))
        fail_msg("not '%s': %s", text, s.line);
    assert_non_null(strstr(s.line, "rank 0 at 127.0.0.1:"));
    assert_null(strstr(s.line, "01234567"));
    assert_true(ferry__now_ns() - began < INT64_C(6000000000));
    /* The rank said nothing more, and is gone. */
    if (t != HALF)
        assert_false(take_message(fds[0], m));
    for (int i = t == HALF; i < 3; i++)
        close(fds[i]);
    tcp_seats_drop(&g);
}

static void impostors_are_not_believed(void **state)
{
    (void)state;
    meet_impostor(REFLECT, FERRY_EAUTH, "is not it: the secret is wrong");
    meet_impostor(GUESS, FERRY_EAUTH, "is not it: the secret is wrong");
    meet_impostor(HALF, FERRY_ECONN, "closed by peer");
    meet_impostor(SILENT, FERRY_ETIMEOUT, "no answer within 300 ms");
}

/* Each end of another version is told both. */
static void other_versions_are_named(void **state)
{
    tcp_seat s = {.rank = 0, .w.timeout_ms = 400};
    tcp__proof_message old = "FTCP\1", answer;
    pthread_t thread;
    comm_group g;
    int fd;

    (void)state;
    meet_impostor(OLD, FERRY_EPEER,
                  "refused this rank: protocol version 2, this is 1");
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    start_seat(&g, &s, &thread);
    fd = call_port(g.ports[0]);
    send_message(fd, old);
    assert_true(take_message(fd, answer));
    assert_string_equal((char *)answer + 8, "protocol version 1, this is 2");
    close(fd);
    pthread_join(thread, NULL);
    assert_int_equal(s.status, FERRY_ETIMEOUT);
    tcp_seats_drop(&g);
}

/* Those that stop in the middle, at either message, keep nobody waiting. */
static void slow_and_cut_strangers_hold_nobody_up(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    tcp__identity id = with(&second, "guess");
    tcp__proof_message m;
    tcp__proof p;
    pthread_t thread;
    comm_group g;
    int fds[4];

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    start_seat(&g, &seats[0], &thread);
    assert_int_equal(ferry__tcp_proof_call(&p, 0, 0), FERRY_OK);
    ferry__tcp_proof_write(&p, &id, TCP__HELLO, m);
    for (int i = 0; i < 4; i++) {
        fds[i] = call_port(g.ports[0]);
        assert_true(write(fds[i], m, i < 2 ? 50 : sizeof(m)) > 0);
    }
    for (int i = 2; i < 4; i++)
        assert_true(take_message(fds[i], m));
    assert_true(write(fds[2], m, 60) > 0);
    close(fds[0]);
    close(fds[2]);
    seats[1].group = &g;
    tcp_sit(&seats[1]);
    pthread_join(thread, NULL);
    assert_int_equal(seats[0].status, FERRY_OK);
    assert_int_equal(seats[1].status, FERRY_OK);
    close(fds[1]);
    close(fds[3]);
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

/* The port of exposed memory gives nothing to who only has the key. */
static void a_key_alone_pulls_nothing(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    tcp__identity guess = with(&second, "guess"),
                  id = with(&second, tcp_seats_secret);
    unsigned char key[FERRY__PULL_KEY], exposed[64], got[64] = {0};
    tcp__proof_message hello, proof;
    unsigned char ask[104] = "FTPL";
    atomic_int n_lines = 0;
    size_t key_bytes;
    comm_group g;
    int fd;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    tcp_sit_down(seats, 2);
    memset(exposed, 0x5a, sizeof(exposed));
    assert_int_equal(seats[0].c->ops->expose(seats[0].c, exposed,
                                             sizeof(exposed), key, &key_bytes),
                     FERRY_OK);
    assert_null(memmem(key, key_bytes, tcp_seats_secret, 8));
    /* A question without a proof, and a proof by a guess. */
    fd = call_port((int32_t)ferry__read_u32(key + 4));
    memcpy(ask + 8, key + 8, 8);
    ask[24] = sizeof(exposed);
    ferry_log_set(count_refusals, &n_lines);
    send_message(fd, ask);
    assert_false(take_message(fd, hello));
    ferry_log_set(NULL, NULL);
    assert_int_equal(atomic_load(&n_lines), 1);
    close(fd);
    fd = call_port((int32_t)ferry__read_u32(key + 4));
    assert_false(shake_by_hand(fd, &guess, 3, hello, proof));
    close(fd);
    /* A proof for another channel is none for this one. */
    fd = call_port((int32_t)ferry__read_u32(key + 4));
    hello[28] = 0;
    send_message(fd, hello);
    assert_false(take_message(fd, hello));
    close(fd);
    fd = call_port((int32_t)ferry__read_u32(key + 4));
    assert_true(shake_by_hand(fd, &id, 3, hello, proof));
    close(fd);
    assert_int_equal(seats[1].c->ops->pull(seats[1].c, got, sizeof(got), 0, key,
                                           key_bytes, 0, T),
                     FERRY_OK);
    assert_memory_equal(got, exposed, sizeof(got));
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

typedef struct impostor {
    int listener;
    bool asked;
} impostor;

static void *play_server(void *arg)
{
    tcp__identity id = with(&first, "guess");
    impostor *i = arg;
    int fd = take_call(i->listener);
    tcp__proof_message m;
    tcp__proof p;

    if (take_message(fd, m) &&
        ferry__tcp_proof_answer(&p, &id, m) == FERRY_OK) {
        ferry__tcp_proof_write(&p, &id, TCP__CHALLENGE, m);
        send_message(fd, m);
        (void)take_message(fd, m);
        ferry__tcp_proof_write(&p, &id, TCP__WELCOME, m);
        send_message(fd, m);
        i->asked = take_message(fd, m);
    }
    close(fd);
    return NULL;
}

/* Who took over the port of exposed memory feeds nothing. */
static void a_puller_believes_no_impostor(void **state)
{
    tcp_seat seats[2] = {{.rank = 0}, {.rank = 1}};
    unsigned char key[FERRY__PULL_KEY], exposed[64] = {0}, got[64] = {0};
    impostor i = {.asked = true};
    pthread_t thread;
    size_t key_bytes;
    comm_group g;
    int32_t port;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 2, 0), FERRY_OK);
    seats[0].group = seats[1].group = &g;
    tcp_sit_down(seats, 2);
    assert_int_equal(seats[0].c->ops->expose(seats[0].c, exposed,
                                             sizeof(exposed), key, &key_bytes),
                     FERRY_OK);
    assert_int_equal(ferry__tcp_listen("127.0.0.1", 0, &i.listener, &port),
                     FERRY_OK);
    ferry__write_u32(key + 4, (uint32_t)port);
    assert_int_equal(ferry__thread_start(&thread, "impostor", play_server, &i),
                     FERRY_OK);
    assert_int_equal(seats[1].c->ops->pull(seats[1].c, got, sizeof(got), 0, key,
                                           key_bytes, 0, T),
                     FERRY_EAUTH);
    assert_non_null(strstr(ferry_last_error(),
                           "pull: rank 0: what answers there is not it: "
                           "the secret is wrong"));
    pthread_join(thread, NULL);
    assert_false(i.asked);
    close(i.listener);
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
    tcp_seats_drop(&g);
}

/* O-18 */
static void o18_duplicate_rank_is_refused_by_name(void **state)
{
    tcp_seat seats[3] = {{.rank = 0}, {.rank = 1}, {.rank = 1}};
    comm_group g;
    int refused;

    (void)state;
    assert_int_equal(tcp_seats_make(&g, 3, 0), FERRY_OK);
    for (int i = 0; i < 3; i++) {
        seats[i].group = &g;
        seats[i].w.timeout_ms = 500;
    }
    tcp_sit_down(seats, 3);
    refused = strstr(seats[1].line, "rank 1 claimed twice") ? 1 : 2;
    assert_non_null(strstr(seats[refused].line, "rank 1 claimed twice"));
    assert_int_equal(seats[0].status, FERRY_ETIMEOUT);
    for (int i = 0; i < 3; i++)
        ferry__comm_close(&seats[i].c);
    tcp_seats_drop(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strangers_are_refused_and_the_group_still_forms),
        cmocka_unit_test(the_log_of_strangers_is_bounded),
        cmocka_unit_test(silent_strangers_are_told_of),
        cmocka_unit_test(wrong_peers_are_told_why),
        cmocka_unit_test(replayed_transcript_is_refused),
        cmocka_unit_test(impostors_are_not_believed),
        cmocka_unit_test(other_versions_are_named),
        cmocka_unit_test(slow_and_cut_strangers_hold_nobody_up),
        cmocka_unit_test(a_key_alone_pulls_nothing),
        cmocka_unit_test(a_puller_believes_no_impostor),
        cmocka_unit_test(o18_duplicate_rank_is_refused_by_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
