/* SPDX-License-Identifier: Apache-2.0 */
/* The ucx group: the cases of every provider over what UCX chooses here and,
 * in a process of its own, over TCP alone; and what only it has.
 * ctest: timeout=300 */
#include "comm/provider.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "harness/comm_cases.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define T 10000

/* A process of its own serves the store, so that ranks are not forked from
 * one with threads. */
static pid_t server;
static int32_t port;
static uint64_t generation;

static int serve(void)
{
    int pipes[2];

    if (pipe(pipes) != 0)
        return -1;
    server = fork();
    if (server == 0) {
        ferry__store_server *s;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (ferry__store_serve("127.0.0.1", 0, &port, &s) < 0 ||
            write(pipes[1], &port, sizeof(port)) != sizeof(port))
            _exit(1);
        for (;;)
            pause();
    }
    if (read(pipes[0], &port, sizeof(port)) != sizeof(port))
        return -1;
    close(pipes[0]);
    close(pipes[1]);
    return 0;
}

static ferry_status make(comm_group *g, int32_t world_size, size_t slot_bytes)
{
    (void)slot_bytes;
    g->world_size = world_size;
    g->ports[0] = (int32_t)++generation;
    return FERRY_OK;
}

static ferry_status open_group(ferry__group *group, ferry__comm **out)
{
    const ferry__provider *p;
    ferry__store *store;
    ferry_status status;

    FERRY_TRY(ferry__provider_find("ucx", &p));
    FERRY_TRY(ferry__store_open("127.0.0.1", port, T, &store));
    status = p->open(store, group, out);
    ferry__store_close(&store);
    return status;
}

static ferry__group group_of(const comm_group *g, int32_t rank)
{
    return (ferry__group){.rank = rank,
                          .world_size = g->world_size,
                          .generation = (uint64_t)g->ports[0],
                          .secret = "secret",
                          .timeout_ms = T};
}

static ferry_status open_rank(comm_group *g, int32_t rank, ferry__comm **out)
{
    ferry__group group = group_of(g, rank);

    return open_group(&group, out);
}

static ferry_status open_on_two_hosts(comm_group *g, int32_t rank,
                                      ferry__comm **out)
{
    ferry__group group = group_of(g, rank);

    group.host_name = rank == 0 || rank == 3 ? "east" : "west";
    return open_group(&group, out);
}

static void drop(comm_group *g)
{
    (void)g;
}

/* ---- ranks as threads ---- */

typedef struct seat {
    ferry__group group;
    ferry_status status;
    char line[512];
    ferry__comm *c;
} seat;

static void *sit(void *arg)
{
    seat *s = arg;

    s->status = open_group(&s->group, &s->c);
    snprintf(s->line, sizeof(s->line), "%s",
             s->status < 0 ? ferry_last_error() : "");
    return NULL;
}

static void sit_down(seat *seats, int32_t n)
{
    pthread_t threads[COMM_WORLD_MAX];

    for (int32_t i = 0; i < n; i++)
        assert_int_equal(
            ferry__thread_start(&threads[i], "seat", sit, &seats[i]), FERRY_OK);
    for (int32_t i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
}

static void seat_two(seat *seats)
{
    comm_group g;

    assert_int_equal(make(&g, 2, 0), FERRY_OK);
    for (int32_t r = 0; r < 2; r++)
        seats[r] = (seat){.group = group_of(&g, r)};
}

static void stand_up(seat *seats)
{
    ferry__comm_close(&seats[0].c);
    ferry__comm_close(&seats[1].c);
}

static void wrong_secret_is_refused_by_name(void **state)
{
    seat seats[2];

    (void)state;
    seat_two(seats);
    seats[0].group.timeout_ms = seats[1].group.timeout_ms = 600;
    seats[1].group.secret = "guess";
    sit_down(seats, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(seats[i].status, FERRY_EAUTH);
        assert_non_null(strstr(seats[i].line, i == 0 ? "rank 1" : "rank 0"));
        assert_non_null(strstr(seats[i].line, "the secret is wrong"));
    }
    stand_up(seats);
}

static void path_names_the_transports(void **state)
{
    const char *tls = getenv("UCX_TLS");
    seat seats[2];
    char path[128];

    (void)state;
    seat_two(seats);
    sit_down(seats, 2);
    assert_int_equal(seats[0].status, FERRY_OK);
    assert_string_equal(seats[0].c->ops->provider, "ucx");
    seats[0].c->ops->describe(seats[0].c, path, sizeof(path));
    print_message("path: %s\n", path);
    assert_memory_equal(path, "ucx ", 4);
    if (tls)
        assert_string_equal(path, "ucx tcp");
    stand_up(seats);
}

/* Two groups of one process do not see each other's messages. */
static void two_groups_live_beside_each_other(void **state)
{
    seat a[2], b[2];
    char byte = 'a';

    (void)state;
    seat_two(a);
    sit_down(a, 2);
    seat_two(b);
    sit_down(b, 2);
    assert_int_equal(a[0].c->ops->broadcast(a[0].c, &byte, 1, 0, T), FERRY_OK);
    byte = 'b';
    assert_int_equal(b[0].c->ops->broadcast(b[0].c, &byte, 1, 0, T), FERRY_OK);
    assert_int_equal(b[1].c->ops->broadcast(b[1].c, &byte, 1, 0, T), FERRY_OK);
    assert_int_equal(byte, 'b');
    assert_int_equal(a[1].c->ops->broadcast(a[1].c, &byte, 1, 0, T), FERRY_OK);
    assert_int_equal(byte, 'a');
    stand_up(a);
    stand_up(b);
}

static void bytes_sent_before_leaving_arrive(void **state)
{
    char got[5000] = {0};
    seat seats[2];

    (void)state;
    seat_two(seats);
    sit_down(seats, 2);
    memset(got, 7, sizeof(got));
    assert_int_equal(
        seats[0].c->ops->broadcast(seats[0].c, got, sizeof(got), 0, T),
        FERRY_OK);
    ferry__comm_close(&seats[0].c);
    memset(got, 0, sizeof(got));
    assert_int_equal(
        seats[1].c->ops->broadcast(seats[1].c, got, sizeof(got), 0, T),
        FERRY_OK);
    assert_int_equal(got[4999], 7);
    assert_int_equal(seats[1].c->ops->barrier(seats[1].c, T), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 0 left"));
    stand_up(seats);
}

static int open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* O-19 */
static void o19_ten_groups_one_after_the_other(void **state)
{
    int before = 0;

    (void)state;
    for (int i = 1; i <= 10; i++) {
        seat seats[2];
        char byte = (char)i;

        seat_two(seats);
        sit_down(seats, 2);
        assert_int_equal(seats[0].status, FERRY_OK);
        assert_int_equal(seats[1].status, FERRY_OK);
        assert_int_equal(seats[0].c->ops->broadcast(seats[0].c, &byte, 1, 0, T),
                         FERRY_OK);
        byte = 0;
        assert_int_equal(seats[1].c->ops->broadcast(seats[1].c, &byte, 1, 0, T),
                         FERRY_OK);
        assert_int_equal(byte, (char)i);
        stand_up(seats);
        if (i == 1)
            before = open_descriptors();
    }
    assert_int_equal(open_descriptors(), before);
}

static ferry_status refuse(void *arg, const char *what)
{
    (void)arg;
    return ferry_fail(FERRY_ECANCELED, "%s: the owner has had enough", what);
}

static void owner_ends_a_wait_within_its_slice(void **state)
{
    int64_t began = ferry__now_ns();
    char byte = 0;
    seat seats[2];

    (void)state;
    seat_two(seats);
    sit_down(seats, 2);
    seats[1].c->check = refuse;
    assert_int_equal(seats[1].c->ops->broadcast(seats[1].c, &byte, 1, 0, T),
                     FERRY_ECANCELED);
    assert_non_null(strstr(ferry_last_error(), "has had enough"));
    assert_true(ferry__now_ns() - began < INT64_C(3000000000));
    assert_int_equal(seats[0].c->ops->barrier(seats[0].c, T), FERRY_EPEER);
    stand_up(seats);
}

/* The owner's check also ends the meeting. */
static void owner_ends_a_meeting(void **state)
{
    seat seats[2];

    (void)state;
    seat_two(seats);
    seats[1].group.check = refuse;
    sit(&seats[1]);
    assert_int_equal(seats[1].status, FERRY_ECANCELED);
}

static void silence_is_bounded_by_no_progress(void **state)
{
    size_t size = (size_t)3 << 20;
    char *bytes = calloc(1, size);
    seat seats[2];

    (void)state;
    seat_two(seats);
    seats[0].group.no_progress_ms = 300;
    sit_down(seats, 2);
    assert_int_equal(seats[0].c->ops->broadcast(seats[0].c, bytes, size, 0, T),
                     FERRY_ENOPROGRESS);
    assert_non_null(strstr(ferry_last_error(), "rank 1 took nothing more"));
    stand_up(seats);
    free(bytes);
}

/* ---- a peer that is of the group and says what is wrong ---- */

typedef struct forged_card {
    uint32_t magic, version;
    uint64_t token, address_bytes, address_digest;
    uint32_t ucx_version, zero;
} forged_card;

static const forged_card plain = {0x58435546, 2, 7, 64, 0, 0, 0};

/* Rank 1 meets as a tcp group does and then gives the card and, if it comes
 * to that, an address of zeros. */
static void meet_forged(forged_card mine, ferry_status want, const char *text)
{
    char address[1 << 16] = {0}, *all = calloc(2, sizeof(address));
    const ferry__provider *tcp;
    forged_card cards[2];
    ferry__store *store;
    pthread_t thread;
    ferry__comm *c;
    seat seats[2];

    seat_two(seats);
    assert_int_equal(ferry__thread_start(&thread, "seat", sit, &seats[0]),
                     FERRY_OK);
    assert_int_equal(ferry__provider_find("tcp", &tcp), FERRY_OK);
    assert_int_equal(ferry__store_open("127.0.0.1", port, T, &store), FERRY_OK);
    assert_int_equal(tcp->open(store, &seats[1].group, &c), FERRY_OK);
    assert_int_equal(c->ops->all_gather(c, &mine, sizeof(mine), cards, T),
                     FERRY_OK);
    assert_int_equal(cards[0].magic, plain.magic);
    assert_int_equal(cards[0].version, plain.version);
    if (mine.address_bytes <= sizeof(address) && mine.address_bytes > 0)
        c->ops->all_gather(c, address,
                           cards[0].address_bytes > mine.address_bytes
                               ? cards[0].address_bytes
                               : mine.address_bytes,
                           all, T);
    pthread_join(thread, NULL);
    assert_int_equal(seats[0].status, want);
    if (!strstr(seats[0].line, text))
        fail_msg("'%s' is not in '%s'", text, seats[0].line);
    ferry__comm_close(&c);
    ferry__store_close(&store);
    free(all);
}

static void damaged_addresses_are_refused_by_name(void **state)
{
    forged_card k = plain;

    (void)state;
    meet_forged(k, FERRY_EDIGEST, "ucx: the address of rank 1 is damaged");
    k.address_bytes = UINT64_C(1) << 40;
    meet_forged(k, FERRY_EPEER,
                "ucx: the address of rank 1 has 1099511627776 bytes, at most "
                "65536");
    k.address_bytes = 0;
    meet_forged(k, FERRY_EPEER, "ucx: the address of rank 1 has 0 bytes");
    k = plain;
    k.version = 1;
    meet_forged(k, FERRY_EVERSION,
                "ucx: rank 1 has protocol version 1, this is 2");
    k.magic = 1;
    meet_forged(k, FERRY_EPEER, "the card of rank 1 is not readable");
}

static void damaged_keys_are_refused_by_name(void **state)
{
    unsigned char key[FERRY__PULL_KEY], bytes[64] = {5}, got[64] = {0};
    seat seats[2];
    size_t n;

    (void)state;
    seat_two(seats);
    sit_down(seats, 2);
    assert_int_equal(
        seats[0].c->ops->expose(seats[0].c, bytes, sizeof(bytes), key, &n),
        FERRY_OK);
    key[n - 1] ^= 1;
    assert_int_equal(
        seats[1].c->ops->pull(seats[1].c, got, sizeof(got), 0, key, n, 0, T),
        FERRY_EDIGEST);
    assert_string_equal(ferry_last_error(),
                        "pull: the key of rank 0 is damaged");
    key[n - 1] ^= 1;
    assert_int_equal(seats[1].c->ops->pull(seats[1].c, got, sizeof(got), 0, key,
                                           n - 1, 0, T),
                     FERRY_EDIGEST);
    assert_int_equal(
        seats[1].c->ops->pull(seats[1].c, got, sizeof(got), 0, key, n, 0, T),
        FERRY_OK);
    assert_memory_equal(got, bytes, sizeof(got));
    stand_up(seats);
}

static void see_cut(ferry_log_level level, const char *line, void *arg)
{
    (void)level;
    if (strstr(line, "ucx has not ended"))
        atomic_fetch_add((atomic_int *)arg, 1);
}

/* What UCX does not end in time loses its worker before the caller has its
 * memory back, which here is gone at once. */
static void operations_that_do_not_end_are_cut_off(void **state)
{
    size_t size = (size_t)6 << 20;
    char *other = malloc(size);
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    atomic_int cuts = 0;
    seat seats[2];

    (void)state;
    assert_true(bytes != MAP_FAILED);
    memset(bytes, 3, size);
    memset(other, 2, size);
    seat_two(seats);
    seats[0].group.no_progress_ms = 300;
    sit_down(seats, 2);
    ferry_log_set(see_cut, &cuts);
    ferry__fault_arm(FERRY__FAULT_UCX_DROP, 1);
    assert_int_equal(seats[0].c->ops->broadcast(seats[0].c, bytes, size, 0, T),
                     FERRY_ENOPROGRESS);
    munmap(bytes, size);
    assert_int_equal(atomic_load(&cuts), 1);
    /* The other one gets nothing of what was under way, and both can end. */
    assert_int_equal(seats[1].c->ops->broadcast(seats[1].c, other, size, 0, T),
                     FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "rank 0"));
    for (size_t i = 0; i < size; i++)
        assert_true(other[i] == 2);
    assert_int_equal(seats[0].c->ops->barrier(seats[0].c, T),
                     FERRY_ENOPROGRESS);
    stand_up(seats);
    ferry_log_set(NULL, NULL);
    assert_int_equal(atomic_load(&cuts), 1);
    free(other);
}

static int cases(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_secret_is_refused_by_name),
        cmocka_unit_test(path_names_the_transports),
        cmocka_unit_test(two_groups_live_beside_each_other),
        cmocka_unit_test(bytes_sent_before_leaving_arrive),
        cmocka_unit_test(o19_ten_groups_one_after_the_other),
        cmocka_unit_test(owner_ends_a_wait_within_its_slice),
        cmocka_unit_test(owner_ends_a_meeting),
        cmocka_unit_test(silence_is_bounded_by_no_progress),
        cmocka_unit_test(damaged_addresses_are_refused_by_name),
        cmocka_unit_test(damaged_keys_are_refused_by_name),
        cmocka_unit_test(operations_that_do_not_end_are_cut_off),
    };
    static const comm_maker one_host = {
        .name = "ucx", .make = make, .open = open_rank, .drop = drop};
    static const comm_maker two_hosts = {.name = "ucx, two hosts",
                                         .make = make,
                                         .open = open_on_two_hosts,
                                         .moves_only = true,
                                         .drop = drop};
    int failed = comm_cases_run(&one_host);

    if (!getenv("UCX_TLS"))
        failed += comm_cases_run(&two_hosts);
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}

/* Asked in a child, so that the parent of ranks has not loaded UCX. */
static bool ucx_is_here(void)
{
    pid_t child = fork();
    int how;

    if (child == 0) {
        const ferry__provider *p;

        if (ferry__provider_find("ucx", &p) >= 0 && p->available() >= 0)
            _exit(0);
        fprintf(stderr, "skipped: %s\n", ferry_last_error());
        _exit(1);
    }
    return waitpid(child, &how, 0) == child && how == 0;
}

static int over_tcp(char *program)
{
    pid_t child = fork();
    int how;

    if (child == 0) {
        setenv("UCX_TLS", "tcp,self", 1);
        execl("/proc/self/exe", program, "again", (char *)NULL);
        _exit(127);
    }
    waitpid(child, &how, 0);
    return how != 0;
}

int main(int argc, char **argv)
{
    int failed;

    if (!ucx_is_here())
        return 77;
    if (serve() != 0)
        return 1;
    failed = cases();
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    if (argc == 1)
        failed += over_tcp(argv[0]);
    return failed;
}
