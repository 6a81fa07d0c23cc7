/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous store, ours against ours, and the bytes on its wire as
 * torch 2.13's TCPStore was seen to send and answer them. */
#include "comm/tcp_store.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "comm/tcp_address.h"
#include "comm/tcp_store_state.h"
#include "comm/tcp_store_wire.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define T 20000

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

static ferry__store *client(void)
{
    ferry__store *s = NULL;

    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &s), FERRY_OK);
    return s;
}

static int raw(void)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
    int fd = -1;

    assert_int_equal(ferry__tcp_connect("127.0.0.1", port, &w, &fd), FERRY_OK);
    return fd;
}

/* Sends bytes and compares the whole answer. */
static void exchange(int fd, const void *out, size_t n_out, const void *in,
                     size_t n_in)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
    unsigned char got[256];

    assert_int_equal(ferry__send_all(fd, out, n_out, &w), FERRY_OK);
    assert_int_equal(ferry__recv_all(fd, got, n_in, &w), FERRY_OK);
    assert_memory_equal(got, in, n_in);
}

#define X(fd, out, in) exchange(fd, out, sizeof(out) - 1, in, sizeof(in) - 1)
#define Z7             "\0\0\0\0\0\0\0"
#define HELLO          "\0\xce\xf7\x85\x3c\x0d&,\0\0"

static void golden_bytes_as_torch_sends_them(void **state)
{
    int fd = raw();

    (void)state;
    X(fd, HELLO, "&,\0\0");
    X(fd, "\4\5" Z7 "init/\1" Z7, "\1" Z7);
    X(fd, "\1\2" Z7 "/k\3" Z7 "val\6\1" Z7 "\2" Z7 "/k", "\0");
    X(fd, "\3\2" Z7 "/k", "\3" Z7 "val");
    X(fd, "\4\2" Z7 "/n\5" Z7, "\5" Z7);
    X(fd, "\4\2" Z7 "/n\xfe\xff\xff\xff\xff\xff\xff\xff", "\3" Z7);
    X(fd, "\3\2" Z7 "/n", "\1" Z7 "3");
    X(fd, "\5\2" Z7 "\2" Z7 "/k\2" Z7 "/n", "\0");
    X(fd, "\5\2" Z7 "\2" Z7 "/k\3" Z7 "/zz", "\1");
    X(fd, "\5\0" Z7, "\0");
    X(fd, "\6\1" Z7 "\5" Z7 "/nope\x0c", "\1");
    X(fd, "\7", "\3" Z7); /* init/, /k, /n */
    X(fd, "\x08\2" Z7 "/k", "\1" Z7);
    X(fd, "\x08\2" Z7 "/k", "\0" Z7);
    X(fd, "\2\2" Z7 "/q\0" Z7 "\3" Z7 "new", "\3" Z7 "new");
    X(fd, "\2\2" Z7 "/q\3" Z7 "new\4" Z7 "new2", "\4" Z7 "new2");
    X(fd, "\2\2" Z7 "/q\2" Z7 "xx\4" Z7 "new3", "\4" Z7 "new2");
    X(fd, "\2\3" Z7 "/q2\2" Z7 "xx\4" Z7 "new3", "\2" Z7 "xx");
    X(fd, "\5\1" Z7 "\3" Z7 "/q2", "\1");
    X(fd, "\x09\3" Z7 "/ap\2" Z7 "ab\x09\3" Z7 "/ap\2" Z7 "cd\3\3" Z7 "/ap",
      "\4" Z7 "abcd");
    X(fd,
      "\x0b\2" Z7 "\3" Z7 "/m1\2" Z7 "v1\3" Z7 "/m2\3" Z7 "v22"
      "\x0a\2" Z7 "\3" Z7 "/m1\3" Z7 "/m2",
      "\2" Z7 "v1\3" Z7 "v22");
    close(fd);
}

/* What is refused ends that client alone. */
static void bad_clients_are_dropped_alone(void **state)
{
    static const struct {
        const char *bytes;
        size_t size;
    } bad[] = {
        {"GET / HTTP/1.1\r\n\r\n", 18},
        {"\0\1\2\3\4", 5},                  /* another magic */
        {"\1\1" Z7 "k\1" Z7 "v", 19},       /* no greeting */
        {HELLO "\x0e", 11},                 /* an unknown request */
        {HELLO "\3\3" Z7 "/no", 22},        /* an absent key */
        {HELLO "\3\1\0\0\0\0\0\0\x80", 19}, /* 2^63 bytes of key */
        {HELLO "\6\1\0\0\0\0\0\0\x40", 19}, /* 2^62 keys */
        {HELLO "\1\1" Z7 "t\1" Z7 "t\4\1" Z7 "t\1" Z7, 47}, /* a text + 1 */
    };
    ferry__store *s = client();
    int64_t n;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
        unsigned char byte[64];
        int fd = raw();

        assert_int_equal(ferry__send_all(fd, bad[i].bytes, bad[i].size, &w),
                         FERRY_OK);
        assert_int_equal(ferry__recv_all(fd, byte, sizeof(byte), &w),
                         FERRY_ECONN);
        close(fd);
        assert_int_equal(ferry__store_add(s, "alive", 1, &n), FERRY_OK);
        assert_int_equal(n, (int64_t)i + 1);
    }
    ferry__store_close(&s);
}

typedef struct lines {
    pthread_mutex_t lock;
    size_t n;
    char first[256];
    uint64_t told; /* how many were dropped, by all lines together */
} lines;

static void see_drops(ferry_log_level level, const char *line, void *arg)
{
    lines *l = arg;
    const char *more = strstr(line, "(and "), *only = strstr(line, "dropped: ");

    if (level != FERRY_LOG_WARN || !strstr(line, "a client is dropped"))
        return;
    pthread_mutex_lock(&l->lock);
    if (l->n++ == 0)
        snprintf(l->first, sizeof(l->first), "%s", line);
    if (more)
        l->told += 1 + strtoull(more + 5, NULL, 10);
    else
        l->told += strstr(line, " more") ? strtoull(only + 9, NULL, 10) : 1;
    pthread_mutex_unlock(&l->lock);
}

/* J3: nor can they fill its log: a line a second, and none is forgotten. */
static void the_log_of_bad_clients_is_bounded(void **state)
{
    const size_t n = 200;
    lines l = {.lock = PTHREAD_MUTEX_INITIALIZER};
    int64_t from_ns = ferry__now_ns(), seconds;

    (void)state;
    ferry_log_set(see_drops, &l);
    for (size_t i = 0; i < n; i++) {
        ferry__waiter w = {NULL, NULL, ferry__deadline_in(T), "raw"};
        unsigned char byte;
        int fd = raw();

        assert_int_equal(ferry__send_all(fd, "GET / HTTP/1.1", 14, &w),
                         FERRY_OK);
        assert_int_equal(ferry__recv_all(fd, &byte, 1, &w), FERRY_ECONN);
        close(fd);
    }
    ferry__store_server_close(&server); /* which tells the rest */
    ferry_log_set(NULL, NULL);
    seconds = (ferry__now_ns() - from_ns) / 1000000000 + 1;
    assert_non_null(strstr(l.first, "dropped: "));
    assert_in_range(l.n, 2, 1 + seconds);
    assert_int_equal(l.told, n);
}

/* J3: clients that only wait cannot fill the server's memory either. */
static void keys_that_are_waited_for_are_bounded(void **state)
{
    const size_t n_keys = 1024, key = 4096, size = 9 + n_keys * (8 + key);
    ferry__store_state *s = calloc(1, sizeof(*s));
    unsigned char *wait = calloc(1, size);
    ferry_status status = FERRY_OK;
    int n_peers = 0;

    (void)state;
    assert_true(s && wait);
    wait[0] = FERRY__STORE_WAIT;
    ferry__store_put_u64(wait + 1, n_keys);
    for (size_t i = 0; i < n_keys; i++)
        ferry__store_put_u64(wait + 9 + i * (8 + key), key);
    while (status >= 0 && n_peers < 100) {
        ferry__store_peer *p;

        assert_int_equal(ferry__store_peer_add(s, &p), FERRY_OK);
        assert_int_equal(ferry__store_feed(s, p, HELLO, 5), FERRY_OK);
        status = ferry__store_feed(s, p, wait, size);
        n_peers++;
    }
    assert_int_equal(status, FERRY_ENOSPC);
    assert_in_range(n_peers, 10, 16);
    while (s->peers)
        ferry__store_peer_remove(s, s->peers);
    assert_int_equal(s->buffered_bytes, 0);
    free(wait);
    free(s);
}

static void every_call_round_trips(void **state)
{
    const char *keys[] = {"a", "b/c"};
    const void *values[] = {"1", "two"};
    size_t sizes[] = {1, 3}, got_sizes[2], size;
    void *got[2], *value;
    ferry__store *s = client(), *other = client();
    int64_t n;
    bool there;

    (void)state;
    assert_int_equal(ferry__store_check(s, keys, 2), FERRY_DONE);
    assert_int_equal(ferry__store_multi_set(s, keys, values, sizes, 2),
                     FERRY_OK);
    assert_int_equal(ferry__store_wait(other, keys, 2, T), FERRY_OK);
    assert_int_equal(ferry__store_check(other, keys, 2), FERRY_OK);
    assert_int_equal(ferry__store_multi_get(other, keys, 2, got, got_sizes),
                     FERRY_OK);
    assert_int_equal(got_sizes[0], 1);
    assert_string_equal(got[1], "two");
    ferry__free(got[0]);
    ferry__free(got[1]);
    assert_int_equal(ferry__store_append(s, "a", "23", 2), FERRY_OK);
    assert_int_equal(ferry__store_add(s, "a", 4, &n), FERRY_OK);
    assert_int_equal(n, 127);
    assert_int_equal(ferry__store_get(other, "a", T, &value, &size), FERRY_OK);
    assert_string_equal(value, "127");
    ferry__free(value);
    assert_int_equal(ferry__store_compare_set(s, "a", "127", "", &value, &size),
                     FERRY_OK);
    assert_int_equal(size, 0);
    ferry__free(value);
    assert_int_equal(ferry__store_num_keys(s, &n), FERRY_OK);
    assert_int_equal(n, 2);
    assert_int_equal(ferry__store_delete(s, "a", &there), FERRY_OK);
    assert_true(there);
    assert_int_equal(ferry__store_delete(s, "a", &there), FERRY_OK);
    assert_false(there);
    ferry__store_close(&s);
    ferry__store_close(&other);
}

static void large_values_pass_and_larger_are_refused(void **state)
{
    size_t most = FERRY__STORE_VALUE_BYTES, size;
    unsigned char *bytes = malloc(most + 1);
    ferry__store *s = client();
    void *value;

    (void)state;
    for (size_t i = 0; i <= most; i++)
        bytes[i] = (unsigned char)(i * 31 >> 3);
    assert_int_equal(ferry__store_set(s, "big", bytes, most), FERRY_OK);
    assert_int_equal(ferry__store_get(s, "big", T, &value, &size), FERRY_OK);
    assert_int_equal(size, most);
    assert_memory_equal(value, bytes, most);
    ferry__free(value);
    assert_int_equal(ferry__store_set(s, "big", bytes, most + 1),
                     FERRY_EOVERFLOW);
    /* The store as a whole is bounded too: it drops who fills it. */
    for (int i = 0; i < 20; i++) {
        char key[16];

        snprintf(key, sizeof(key), "big%d", i);
        if (ferry__store_set(s, key, bytes, most) < 0)
            break;
    }
    assert_true(ferry__store_delete(s, "big", NULL) < 0);
    ferry__store_close(&s);
    s = client();
    assert_int_equal(ferry__store_delete(s, "big", NULL), FERRY_OK);
    ferry__store_close(&s);
    free(bytes);
}

static void wait_ends_in_time_and_the_client_goes_on(void **state)
{
    const char *keys[] = {"there", "never"};
    int64_t began = ferry__now_ns(), n;
    ferry__store *s = client();

    (void)state;
    assert_int_equal(ferry__store_set(s, "there", "", 0), FERRY_OK);
    assert_int_equal(ferry__store_wait(s, keys, 2, 150), FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "150 ms"));
    assert_true(ferry__now_ns() - began < INT64_C(2000000000));
    assert_int_equal(ferry__store_add(s, "n", 2, &n), FERRY_OK);
    assert_int_equal(n, 2);
    ferry__store_close(&s);
}

/* O-14: rank 1 is 40 ms late in each round; nobody passes before it. */
static int64_t arrived_ns[6];

static void *late_rank(void *arg)
{
    ferry__store *s = NULL;

    (void)arg;
    if (ferry__store_open("127.0.0.1", port, T, &s) < 0)
        return (void *)1;
    for (uint64_t g = 1; g <= 5; g++) {
        ferry__sleep_ms(40);
        __atomic_store_n(&arrived_ns[g], ferry__now_ns(), __ATOMIC_SEQ_CST);
        if (ferry__store_barrier(s, "round", g, "end", 2, T) < 0)
            return (void *)1;
    }
    ferry__store_close(&s);
    return NULL;
}

static void o14_barriers_of_dead_generations_leave_nothing(void **state)
{
    ferry__store *s = client();
    pthread_t thread;
    void *rc;
    int64_t n;

    (void)state;
    assert_int_equal(ferry__thread_start(&thread, "late", late_rank, NULL),
                     FERRY_OK);
    for (uint64_t g = 1; g <= 5; g++) {
        assert_int_equal(ferry__store_barrier(s, "round", g, "end", 2, T),
                         FERRY_OK);
        n = __atomic_load_n(&arrived_ns[g], __ATOMIC_SEQ_CST);
        assert_true(n != 0 && n <= ferry__now_ns());
    }
    pthread_join(thread, &rc);
    assert_null(rc);
    assert_int_equal(ferry__store_num_keys(s, &n), FERRY_OK);
    assert_int_equal(n, 0);
    ferry__store_close(&s);
}

/* O-17 */
static void busy_port_is_one_error_that_names_it(void **state)
{
    ferry__store_server *second = NULL;
    int64_t began = ferry__now_ns();
    char text[FERRY__TCP_TEXT_BYTES];
    int32_t again;

    (void)state;
    assert_int_equal(ferry__store_serve("127.0.0.1", port, &again, &second),
                     FERRY_EEXIST);
    assert_null(second);
    assert_non_null(
        strstr(ferry_last_error(), ferry__tcp_text(text, "127.0.0.1", port)));
    assert_true(ferry__now_ns() - began < INT64_C(1000000000));
    ferry__store_server_close(&server);
    assert_int_equal(ferry__store_serve("127.0.0.1", port, &again, &server),
                     FERRY_OK);
    assert_int_equal(again, port);
}

/* O-15 */
static void ipv6_in_all_its_spellings(void **state)
{
    static const char *const good[] = {"::1", "[::1]"};
    static const char *const bad[] = {"::1:", "[::1]:80", "[::1", "10.0.0.1:80",
                                      "[]"};
    ferry__store_server *v6 = NULL;
    ferry__store *v6_client = NULL;
    char text[FERRY__TCP_TEXT_BYTES];
    int32_t p;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ferry__store *s = NULL;

        assert_int_equal(ferry__store_open(bad[i], 1, T, &s), FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), bad[i]));
    }
    /* A scope id is understood, though nobody is there. */
    assert_true(ferry__store_open("fe80::1%lo", 1, 100, &v6_client) < 0);
    assert_null(strstr(ferry_last_error(), "is no IPv6 address"));
    assert_string_equal(ferry__tcp_text(text, "fe80::1%lo", 80),
                        "[fe80::1%lo]:80");
    assert_string_equal(ferry__tcp_text(text, "[::1]", 80), "[::1]:80");
    assert_string_equal(ferry__tcp_text(text, "h", 80), "h:80");
    if (ferry__store_serve("::1", 0, &p, &v6) < 0) {
        print_message("no IPv6 here: %s\n", ferry_last_error());
        skip();
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        ferry__store *s = NULL;

        assert_int_equal(ferry__store_open(good[i], p, T, &s), FERRY_OK);
        ferry__store_close(&s);
    }
    ferry__store_server_close(&v6);
}

static void every_address_means_both_families(void **state)
{
    ferry__store_server *any = NULL;
    ferry__store *s = NULL;
    int32_t p;

    (void)state;
    assert_int_equal(ferry__store_serve("", 0, &p, &any), FERRY_OK);
    assert_int_equal(ferry__store_open("127.0.0.1", p, T, &s), FERRY_OK);
    ferry__store_close(&s);
    assert_int_equal(ferry__store_open("localhost", p, T, &s), FERRY_OK);
    ferry__store_close(&s);
    ferry__store_server_close(&any);
}

static void absent_master_is_bounded_and_named(void **state)
{
    int64_t began = ferry__now_ns();
    ferry__store *s = NULL;

    (void)state;
    ferry__store_server_close(&server);
    assert_int_equal(ferry__store_open("127.0.0.1", port, 200, &s),
                     FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "127.0.0.1:"));
    assert_non_null(strstr(ferry_last_error(), "200 ms"));
    assert_true(ferry__now_ns() - began < INT64_C(2000000000));
}

/* A listener that never answers the greeting. */
static void silent_master_is_bounded(void **state)
{
    ferry__store *s = NULL;
    int32_t p;
    int fd;

    (void)state;
    assert_int_equal(ferry__tcp_listen("127.0.0.1", 0, &fd, &p), FERRY_OK);
    assert_int_equal(ferry__store_open("127.0.0.1", p, 200, &s),
                     FERRY_ETIMEOUT);
    close(fd);
}

static void lost_master_fails_every_later_call(void **state)
{
    ferry__store *s = client();
    const char *key = "never";
    int64_t n;

    (void)state;
    assert_int_equal(ferry__store_add(s, "n", 1, &n), FERRY_OK);
    ferry__store_server_close(&server);
    assert_int_equal(ferry__store_wait(s, &key, 1, T), FERRY_ECONN);
    assert_int_equal(ferry__store_add(s, "n", 1, &n), FERRY_ECONN);
    ferry__store_close(&s);
    ferry__store_close(&s);
}

static void master_counts_who_joined(void **state)
{
    ferry__store *s = client(), *other = client();
    int64_t n;

    (void)state;
    assert_int_equal(ferry__store_join(s, &n), FERRY_OK);
    assert_int_equal(n, 1);
    assert_int_equal(ferry__store_await_joined(s, 2, 100), FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "1 of 2"));
    assert_int_equal(ferry__store_join(other, &n), FERRY_OK);
    assert_int_equal(ferry__store_await_joined(s, 2, T), FERRY_OK);
    ferry__store_close(&s);
    ferry__store_close(&other);
}

typedef struct owner {
    bool ends;
    char what[128];
} owner;

static ferry_status ask_owner(void *arg, const char *what)
{
    owner *o = arg;

    snprintf(o->what, sizeof(o->what), "%s", what);
    return o->ends ? ferry_fail(FERRY_ECANCELED, "canceled while %s", what)
                   : FERRY_OK;
}

/* It is said after "while", as in "canceled while". */
static void an_owner_is_told_what_is_waited_for(void **state)
{
    const char *key = "never";
    char expected[128];

    (void)state;
    snprintf(expected, sizeof(expected), "waiting for store 127.0.0.1:%d",
             port);
    for (int i = 0; i < 2; i++) {
        ferry__store *s = NULL;
        owner o = {0};

        assert_int_equal(ferry__store_open_checked("127.0.0.1", port, false, T,
                                                   ask_owner, &o, &s),
                         FERRY_OK);
        o = (owner){.ends = true};
        assert_int_equal(i == 0 ? ferry__store_await_joined(s, 2, T)
                                : ferry__store_wait(s, &key, 1, T),
                         FERRY_ECANCELED);
        assert_string_equal(o.what, expected);
        ferry__store_close(&s);
    }
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, begin, end)
    const struct CMUnitTest tests[] = {
        CASE(golden_bytes_as_torch_sends_them),
        CASE(bad_clients_are_dropped_alone),
        CASE(the_log_of_bad_clients_is_bounded),
        CASE(keys_that_are_waited_for_are_bounded),
        CASE(every_call_round_trips),
        CASE(large_values_pass_and_larger_are_refused),
        CASE(wait_ends_in_time_and_the_client_goes_on),
        CASE(o14_barriers_of_dead_generations_leave_nothing),
        CASE(busy_port_is_one_error_that_names_it),
        CASE(ipv6_in_all_its_spellings),
        CASE(every_address_means_both_families),
        CASE(absent_master_is_bounded_and_named),
        CASE(silent_master_is_bounded),
        CASE(lost_master_fails_every_later_call),
        CASE(master_counts_who_joined),
        CASE(an_owner_is_told_what_is_waited_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
