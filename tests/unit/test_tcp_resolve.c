/* SPDX-License-Identifier: Apache-2.0 */
/* Names are looked up within the caller's bound, even by a resolver that does
 * not answer. This program's getaddrinfo stands before the C library's: a
 * name under "hangs.test" waits until it is let go. */
#include "comm/tcp_resolve.h"

#include "base/clock.h"
#include "base/thread.h"
#include "comm/tcp_address.h"
#include "comm/tcp_store.h"

#include <dlfcn.h>
#include <netdb.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define T       10000
#define LOOKUPS 32 /* that may be left behind */

typedef int resolver(const char *, const char *, const struct addrinfo *,
                     struct addrinfo **);

static atomic_int asked, hanging;
static atomic_bool let_go;

int getaddrinfo(const char *host, const char *service,
                const struct addrinfo *hints, struct addrinfo **out)
{
    resolver *real = (resolver *)(uintptr_t)dlsym(RTLD_NEXT, "getaddrinfo");
    bool by_name = !(hints->ai_flags & AI_NUMERICHOST);

    if (by_name)
        atomic_fetch_add(&asked, 1);
    if (by_name && strstr(host, "hangs.test")) {
        atomic_fetch_add(&hanging, 1);
        while (!atomic_load(&let_go))
            usleep(1000);
        atomic_fetch_sub(&hanging, 1);
        host = "127.0.0.1"; /* an answer that comes too late */
    }
    return real(host, service, hints, out);
}

static ferry__waiter within(int64_t ms)
{
    return (ferry__waiter){NULL, NULL, ferry__deadline_in(ms), "test"};
}

/* Lets go whom a case left hanging, and waits until they have ended. */
static int release(void **state)
{
    ferry__deadline until = ferry__deadline_in(T);

    (void)state;
    atomic_store(&let_go, true);
    while (atomic_load(&hanging) > 0 && !ferry__deadline_passed(&until))
        usleep(1000);
    usleep(20000); /* the last one frees what it found */
    atomic_store(&let_go, false);
    atomic_store(&asked, 0);
    return atomic_load(&hanging) > 0;
}

static void numbers_ask_nobody(void **state)
{
    static const char *const hosts[] = {"127.0.0.1", "::1", "10.1.2.3"};
    ferry__waiter w = within(T);
    struct addrinfo *list;

    (void)state;
    for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
        assert_int_equal(ferry__tcp_resolve(hosts[i], 80, 0, &w, &list),
                         FERRY_OK);
        freeaddrinfo(list);
    }
    assert_int_equal(ferry__tcp_resolve(NULL, 0, AI_PASSIVE, &w, &list),
                     FERRY_OK);
    freeaddrinfo(list);
    assert_int_equal(atomic_load(&asked), 0);
}

static void names_are_found(void **state)
{
    ferry__waiter w = within(T);
    struct addrinfo *list;

    (void)state;
    assert_int_equal(ferry__tcp_resolve("localhost", 80, 0, &w, &list),
                     FERRY_OK);
    assert_int_equal(list->ai_socktype, SOCK_STREAM);
    if (list->ai_family == AF_INET)
        assert_int_equal(ntohs(((struct sockaddr_in *)list->ai_addr)->sin_port),
                         80);
    freeaddrinfo(list);
    assert_int_equal(atomic_load(&asked), 1);
    assert_int_equal(
        ferry__tcp_resolve("no such name, at all", 80, 0, &w, &list),
        FERRY_ECONN);
    assert_non_null(strstr(ferry_last_error(), "no such name, at all:80"));
}

static void a_resolver_that_hangs_is_bounded(void **state)
{
    int64_t began = ferry__now_ns();
    ferry__waiter w = within(250);
    ferry__store *store = NULL;
    struct addrinfo *list;
    int32_t port;
    int fd = -1;

    (void)state;
    assert_int_equal(ferry__tcp_resolve("a.hangs.test", 80, 0, &w, &list),
                     FERRY_ETIMEOUT);
    assert_string_equal(ferry_last_error(),
                        "test: the name 'a.hangs.test' was not looked up "
                        "within 250 ms");
    w = within(250);
    assert_int_equal(ferry__tcp_connect("b.hangs.test", 80, &w, &fd),
                     FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "b.hangs.test"));
    w = within(250);
    assert_int_equal(
        ferry__tcp_listen_within("c.hangs.test", 0, &w, &fd, &port),
        FERRY_ETIMEOUT);
    assert_int_equal(ferry__store_open("d.hangs.test", 80, 250, &store),
                     FERRY_ETIMEOUT);
    assert_null(store);
    assert_int_equal(fd, -1);
    assert_true(ferry__now_ns() - began < INT64_C(8000000000));
}

static ferry_status enough(void *arg)
{
    atomic_int *times = arg;

    if (atomic_fetch_add(times, 1) == 0)
        return FERRY_OK;
    return ferry_fail(FERRY_ECANCELED, "the owner has had enough");
}

static void the_owner_ends_a_lookup(void **state)
{
    atomic_int times = 0;
    ferry__waiter w = within(T);
    struct addrinfo *list;

    (void)state;
    w.check = enough;
    w.arg = &times;
    assert_int_equal(ferry__tcp_resolve("e.hangs.test", 80, 0, &w, &list),
                     FERRY_ECANCELED);
    assert_int_equal(atomic_load(&times), 2);
}

/* A resolver that never answers does not gather threads without end, and
 * works again when it is back. */
static void lookups_left_behind_are_bounded(void **state)
{
    struct addrinfo *list;
    ferry__waiter w;

    for (int i = 0; i < LOOKUPS; i++) {
        w = within(1);
        assert_int_equal(ferry__tcp_resolve("f.hangs.test", 80, 0, &w, &list),
                         FERRY_ETIMEOUT);
    }
    w = within(T);
    assert_int_equal(ferry__tcp_resolve("g.hangs.test", 80, 0, &w, &list),
                     FERRY_ETIMEOUT);
    assert_non_null(strstr(ferry_last_error(), "is not looked up"));
    assert_true(atomic_load(&asked) <= LOOKUPS);
    /* Numbers do not need it. */
    assert_int_equal(ferry__tcp_resolve("127.0.0.1", 80, 0, &w, &list),
                     FERRY_OK);
    freeaddrinfo(list);
    assert_int_equal(release(state), 0);
    while (ferry__tcp_resolve("localhost", 80, 0, &w, &list) < 0) {
        assert_false(ferry__deadline_passed(&w.deadline));
        usleep(1000);
    }
    freeaddrinfo(list);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(numbers_ask_nobody, release),
        cmocka_unit_test_teardown(names_are_found, release),
        cmocka_unit_test_teardown(a_resolver_that_hangs_is_bounded, release),
        cmocka_unit_test_teardown(the_owner_ends_a_lookup, release),
        cmocka_unit_test_teardown(lookups_left_behind_are_bounded, release),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
