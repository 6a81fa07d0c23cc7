/* SPDX-License-Identifier: Apache-2.0 */
/* Stream sockets of one host: bounds, whole buffers, descriptors, frames. */
#include "base/socket.h"

#include "base/alloc.h"
#include "base/thread.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static ferry__waiter within(int64_t ms, const char *what)
{
    return (ferry__waiter){NULL, NULL, ferry__deadline_in(ms), what};
}

static int open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;

    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void unique_name(char *out, size_t size_bytes)
{
    char hex[17];

    assert_int_equal(ferry__random_hex(hex, 8), FERRY_OK);
    snprintf(out, size_bytes, "ferry-test-%s", hex);
}

static void listen_connect_accept_and_know_the_peer(void **state)
{
    ferry__waiter w = within(2000, "test");
    int listener, client, server;
    uint32_t uid = 77;
    int32_t pid = 0;
    char name[64];

    (void)state;
    unique_name(name, sizeof(name));
    assert_int_equal(ferry__unix_listen(name, &listener), FERRY_OK);
    assert_int_equal(ferry__unix_listen(name, &client), FERRY_EEXIST);
    assert_int_equal(ferry__unix_connect(name, &w, &client), FERRY_OK);
    assert_int_equal(ferry__unix_accept(listener, &w, &server), FERRY_OK);
    assert_int_equal(ferry__unix_peer(server, &pid, &uid), FERRY_OK);
    assert_int_equal(pid, getpid());
    assert_int_equal(uid, getuid());
    assert_true(fcntl(server, F_GETFD) & FD_CLOEXEC);
    assert_true(fcntl(client, F_GETFD) & FD_CLOEXEC);
    assert_true(fcntl(server, F_GETFL) & O_NONBLOCK);
    close(listener);
    close(client);
    close(server);
    assert_int_equal(ferry__unix_connect(name, &w, &client), FERRY_ECONN);
    assert_string_equal(ferry_last_error(), "test: nobody listens");
}

static void bad_names_are_refused(void **state)
{
    char name[200];
    int fd;

    (void)state;
    memset(name, 'n', sizeof(name) - 1);
    name[sizeof(name) - 1] = '\0';
    assert_int_equal(ferry__unix_listen(name, &fd), FERRY_EINVAL);
    assert_int_equal(ferry__unix_listen("", &fd), FERRY_EINVAL);
}

typedef struct counted {
    int asked, limit;
} counted;

static ferry_status count(void *arg)
{
    counted *c = arg;

    if (++c->asked >= c->limit)
        return ferry_fail(FERRY_ECANCELED, "stopped");
    return FERRY_OK;
}

static void waits_end_at_the_deadline_and_when_told(void **state)
{
    ferry__waiter w = within(60, "hello, rank 1");
    counted c = {0, 2};
    int fds[2];
    char byte;
    int64_t before = ferry__now_ns();

    (void)state;
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    assert_int_equal(ferry__recv_all(fds[0], &byte, 1, &w), FERRY_ETIMEOUT);
    assert_string_equal(ferry_last_error(),
                        "hello, rank 1: no answer within 60 ms");
    assert_in_range((ferry__now_ns() - before) / 1000000, 59, 2000);
    w = within(10000, "x");
    w.check = count;
    w.arg = &c;
    before = ferry__now_ns();
    assert_int_equal(ferry__recv_all(fds[0], &byte, 1, &w), FERRY_ECANCELED);
    assert_string_equal(ferry_last_error(), "stopped");
    assert_true(ferry__now_ns() - before < 1000000000);
    close(fds[0]);
    close(fds[1]);
}

#define BIG ((size_t)3 << 20)

typedef struct sender {
    int fd;
    const void *bytes;
    ferry_status status;
} sender;

static void *send_big(void *arg)
{
    sender *s = arg;
    ferry__waiter w = within(5000, "send");

    s->status = ferry__send_all(s->fd, s->bytes, BIG, &w);
    return NULL;
}

static void on_alarm(int signal)
{
    (void)signal;
}

/* The alarm hits the receiving thread all the while. */
static void big_buffers_survive_interrupts(void **state)
{
    struct sigaction action = {.sa_handler = on_alarm};
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    unsigned char *out = ferry__alloc(BIG), *in = ferry__alloc(BIG);
    ferry__waiter w = within(5000, "receive");
    sender s = {0};
    pthread_t t;
    int fds[2];

    (void)state;
    for (size_t i = 0; i < BIG; i++)
        out[i] = (unsigned char)(i * 31 >> 3);
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    s.fd = fds[1];
    s.bytes = out;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    assert_int_equal(ferry__thread_start(&t, "send", send_big, &s), FERRY_OK);
    assert_int_equal(ferry__recv_all(fds[0], in, BIG, &w), FERRY_OK);
    setitimer(ITIMER_REAL, &never, NULL);
    pthread_join(t, NULL);
    assert_int_equal(s.status, FERRY_OK);
    assert_memory_equal(in, out, BIG);
    close(fds[0]);
    close(fds[1]);
    ferry__free(in);
    ferry__free(out);
}

/* SIGPIPE has its default here, so a missing flag would end the test. */
static void a_closed_peer_is_an_error_and_no_signal(void **state)
{
    ferry__waiter w = within(2000, "rank 2");
    int fds[2], null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    char bytes[4] = "abc";

    (void)state;
    signal(SIGPIPE, SIG_DFL);
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    assert_false(ferry__socket_hung_up(fds[0]));
    assert_int_equal(ferry__send_all(fds[1], bytes, 2, &w), FERRY_OK);
    assert_false(ferry__socket_hung_up(fds[0]));
    close(fds[1]);
    assert_true(ferry__socket_hung_up(fds[0]));
    assert_int_equal(ferry__recv_all(fds[0], bytes, 4, &w), FERRY_ECONN);
    assert_string_equal(ferry_last_error(), "rank 2: closed by peer");
    assert_int_equal(ferry__send_all(fds[0], bytes, 4, &w), FERRY_ECONN);
    assert_int_equal(ferry__send_fds(fds[0], bytes, 1, &null_fd, 1, &w),
                     FERRY_ECONN);
    close(fds[0]);
    close(null_fd);
}

static void descriptors_travel_with_their_bytes(void **state)
{
    ferry__waiter w = within(2000, "fds");
    int before = open_descriptors();
    int fds[2], pipes[2], got[4];
    size_t n = 0;
    char bytes[6];

    (void)state;
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(ferry__send_fds(fds[0], "hello", 6, pipes, 2, &w),
                     FERRY_OK);
    assert_int_equal(ferry__recv_fds(fds[1], bytes, 6, got, 4, &n, &w),
                     FERRY_OK);
    assert_string_equal(bytes, "hello");
    assert_int_equal(n, 2);
    assert_true(fcntl(got[0], F_GETFD) & FD_CLOEXEC);
    assert_int_equal(write(pipes[1], "z", 1), 1);
    assert_int_equal(read(got[0], bytes, 1), 1);
    assert_int_equal(bytes[0], 'z');
    close(got[0]);
    close(got[1]);
    /* None attached is fine too. */
    assert_int_equal(ferry__send_fds(fds[0], "x", 1, NULL, 0, &w), FERRY_OK);
    assert_int_equal(ferry__recv_fds(fds[1], bytes, 1, got, 4, &n, &w),
                     FERRY_OK);
    assert_int_equal(n, 0);
    /* More than asked for: refused, and none of them stays open. */
    assert_int_equal(ferry__send_fds(fds[0], "x", 1, pipes, 2, &w), FERRY_OK);
    assert_int_equal(ferry__recv_fds(fds[1], bytes, 1, got, 1, &n, &w),
                     FERRY_EPEER);
    assert_string_equal(ferry_last_error(),
                        "fds: more than 1 descriptors came");
    /* Descriptors came, the rest of the bytes did not. */
    assert_int_equal(ferry__send_fds(fds[0], "x", 1, pipes, 2, &w), FERRY_OK);
    close(fds[0]);
    assert_int_equal(ferry__recv_fds(fds[1], bytes, 2, got, 4, &n, &w),
                     FERRY_ECONN);
    close(fds[1]);
    close(pipes[0]);
    close(pipes[1]);
    assert_int_equal(open_descriptors(), before);
}

static void too_many_descriptors_are_refused(void **state)
{
    ferry__waiter w = within(100, "fds");
    int none[65] = {0};
    size_t n;
    char byte = 0;

    (void)state;
    assert_int_equal(ferry__send_fds(0, &byte, 1, none, 65, &w), FERRY_EINVAL);
    assert_int_equal(ferry__recv_fds(0, &byte, 1, none, 65, &n, &w),
                     FERRY_EINVAL);
    assert_int_equal(ferry__send_fds(0, &byte, 0, none, 1, &w), FERRY_EINVAL);
}

static void frames_carry_their_length(void **state)
{
    ferry__waiter w = within(2000, "frame");
    unsigned char wire[7];
    void *bytes = NULL;
    size_t size = 0;
    int fds[2];

    (void)state;
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    assert_int_equal(ferry__send_frame(fds[0], "abc", 3, &w), FERRY_OK);
    assert_int_equal(ferry__recv_all(fds[1], wire, 7, &w), FERRY_OK);
    assert_memory_equal(wire, "\x03\0\0\0abc", 7); /* golden */
    assert_int_equal(ferry__send_frame(fds[0], "abc", 3, &w), FERRY_OK);
    assert_int_equal(ferry__send_frame(fds[0], "", 0, &w), FERRY_OK);
    assert_int_equal(ferry__recv_frame(fds[1], 3, &bytes, &size, &w), FERRY_OK);
    assert_int_equal(size, 3);
    assert_string_equal(bytes, "abc");
    ferry__free(bytes);
    assert_int_equal(ferry__recv_frame(fds[1], 3, &bytes, &size, &w), FERRY_OK);
    assert_int_equal(size, 0);
    assert_string_equal(bytes, "");
    ferry__free(bytes);
    assert_int_equal(ferry__send_frame(fds[0], "abcd", 4, &w), FERRY_OK);
    assert_int_equal(ferry__recv_frame(fds[1], 3, &bytes, &size, &w),
                     FERRY_EPEER);
    assert_string_equal(ferry_last_error(),
                        "frame: frame of 4 bytes, at most 3 are taken");
    assert_int_equal(ferry__recv_all(fds[1], wire, 4, &w), FERRY_OK);
    /* A frame that stops half way. */
    assert_int_equal(ferry__send_all(fds[0], "\x05\0\0\0ab", 6, &w), FERRY_OK);
    close(fds[0]);
    assert_int_equal(ferry__recv_frame(fds[1], 9, &bytes, &size, &w),
                     FERRY_ECONN);
    close(fds[1]);
    assert_int_equal(ferry__send_frame(-1, "", (size_t)UINT32_MAX + 1, &w),
                     FERRY_EOVERFLOW);
}

static void a_frame_without_memory_is_an_error(void **state)
{
    ferry__waiter w = within(2000, "frame");
    void *bytes;
    size_t size;
    int fds[2];

    (void)state;
    assert_int_equal(ferry__socket_pair(fds), FERRY_OK);
    assert_int_equal(ferry__send_frame(fds[0], "abc", 3, &w), FERRY_OK);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry__recv_frame(fds[1], 9, &bytes, &size, &w),
                     FERRY_ENOMEM);
    close(fds[0]);
    close(fds[1]);
}

static void random_text_is_hex_and_differs(void **state)
{
    char a[201], b[201];

    (void)state;
    assert_int_equal(ferry__random_hex(a, 100), FERRY_OK);
    assert_int_equal(ferry__random_hex(b, 100), FERRY_OK);
    assert_int_equal(strlen(a), 200);
    assert_int_equal(strspn(a, "0123456789abcdef"), 200);
    assert_string_not_equal(a, b);
    assert_int_equal(ferry__random_hex(a, 0), FERRY_OK);
    assert_string_equal(a, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(listen_connect_accept_and_know_the_peer),
        cmocka_unit_test(bad_names_are_refused),
        cmocka_unit_test(waits_end_at_the_deadline_and_when_told),
        cmocka_unit_test(big_buffers_survive_interrupts),
        cmocka_unit_test(a_closed_peer_is_an_error_and_no_signal),
        cmocka_unit_test(descriptors_travel_with_their_bytes),
        cmocka_unit_test(too_many_descriptors_are_refused),
        cmocka_unit_test(frames_carry_their_length),
        cmocka_unit_test(a_frame_without_memory_is_an_error),
        cmocka_unit_test(random_text_is_hex_and_differs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
