/* SPDX-License-Identifier: Apache-2.0 */
/* The library is a guest in the program's process: signals, mask, umask,
 * folder, locale and environment are as they were; SIGPIPE, which only the
 * program may ignore, ends nothing; a storm of signals disturbs no round; a
 * forked child cannot spoil its parent's. */
#include "harness/fleet.h"
#include "harness/tiny_http.h"

#include <locale.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "harness/expect.h"

extern char **environ;

static void open_ipc(fleet *f, int32_t tp_size)
{
    fleet_options o = {.backend = "ipc",
                       .toy = {.kind = TOY_M, .tp_size = tp_size}};

    fleet_open(f, &o);
    ok(fleet_connect(f, NULL));
}

static void round_is_right(fleet *f, uint32_t seed)
{
    const char *why;

    ok(fleet_send(f, seed, NULL));
    why = fleet_differs(f, seed);
    if (why != NULL)
        fail_msg("%s", why);
}

/* ---- a guest leaves things as they were ---- */

/* The C library adds it to each disposition that was ever set. libcurl sets
 * SIGPIPE's, and puts it back, when it closes a connection. */
#define RESTORER 0x04000000

typedef struct process_state {
    void (*handlers[65])(int);
    int flags[65];
    char blocked[65];
    mode_t umask;
    char folder[4096], locale[256];
    char *environment; /* owned */
} process_state;

static void look(process_state *p)
{
    struct sigaction action;
    sigset_t mask;
    size_t n = 1;
    char *at;

    memset(p, 0, sizeof(*p));
    assert_int_equal(sigprocmask(SIG_BLOCK, NULL, &mask), 0);
    for (int s = 1; s < 65; s++) {
        if (sigaction(s, NULL, &action) == 0) {
            p->handlers[s] = action.sa_handler;
            p->flags[s] = action.sa_flags & ~RESTORER;
        }
        p->blocked[s] = sigismember(&mask, s) == 1;
    }
    p->umask = umask(0);
    umask(p->umask);
    assert_non_null(getcwd(p->folder, sizeof(p->folder)));
    snprintf(p->locale, sizeof(p->locale), "%s", setlocale(LC_ALL, NULL));
    for (char **e = environ; *e != NULL; e++)
        n += strlen(*e) + 1;
    p->environment = at = malloc(n);
    assert_non_null(at);
    for (char **e = environ; *e != NULL; e++)
        at += sprintf(at, "%s\n", *e);
    *at = '\0';
}

static void same_signals(const process_state *a, const process_state *b)
{
    for (int s = 1; s < 65; s++) {
        assert_true(a->handlers[s] == b->handlers[s]);
        assert_int_equal(a->flags[s], b->flags[s]);
        assert_int_equal(a->blocked[s], b->blocked[s]);
    }
}

static void the_process_is_left_as_it_was(void **state)
{
    process_state before, after;
    ferry_client c = {NULL, NULL};
    tiny_http *s;
    fleet f;

    (void)state;
    if (fleet_unavailable("ipc") != NULL)
        skip();
    s = tiny_http_start("127.0.0.1", NULL, NULL);
    assert_non_null(s);
    look(&before);
    open_ipc(&f, 2);
    round_is_right(&f, 1);
    ok(ferry_client_http(tiny_http_url(s), NULL, &c));
    ok(c.ops->start_weight_update(c.self));
    look(&after); /* While all is open … */
    same_signals(&before, &after);
    free(after.environment);
    ferry_client_close(&c);
    fleet_close(&f);
    look(&after); /* … and when all is closed. */
    same_signals(&before, &after);
    assert_int_equal(before.umask, after.umask);
    assert_string_equal(before.folder, after.folder);
    assert_string_equal(before.locale, after.locale);
    assert_string_equal(before.environment, after.environment);
    free(before.environment);
    free(after.environment);
    tiny_http_stop(s);
}

/* ---- SIGPIPE ---- */

static tiny_reply hang_up(void *arg, const tiny_request *request)
{
    (void)arg;
    (void)request;
    return (tiny_reply){.mode = TINY_SILENT};
}

static void a_peer_that_hangs_up_is_an_error_and_no_signal(void **state)
{
    tiny_http *s = tiny_http_start("127.0.0.1", hang_up, NULL);
    size_t n = (size_t)1 << 20;
    char *info = malloc(n + 16);
    ferry_client c = {NULL, NULL};
    struct sigaction action;

    (void)state;
    assert_non_null(s);
    assert_non_null(info);
    assert_int_equal(sigaction(SIGPIPE, NULL, &action), 0);
    assert_true(action.sa_handler == SIG_DFL);
    strcpy(info, "{\"names\":[\"");
    memset(info + strlen(info), 'n', n);
    strcpy(info + n, "\"]}");
    ok(ferry_client_http(tiny_http_url(s), NULL, &c));
    for (int i = 0; i < 5; i++)
        assert_true(c.ops->update_weights(c.self, info) < 0);
    ferry_client_close(&c);
    free(info);
    tiny_http_stop(s);
}

/* ---- EINTR ---- */

static volatile sig_atomic_t n_alarms;

static void count_alarm(int signal)
{
    (void)signal;
    n_alarms++;
}

/* A handler without SA_RESTART, every half millisecond: each wait and each
 * read of the program's thread is interrupted. */
static void a_storm_of_signals_disturbs_no_round(void **state)
{
    struct sigaction old, storm = {.sa_handler = count_alarm};
    struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    fleet f;

    (void)state;
    if (fleet_unavailable("ipc") != NULL)
        skip();
    assert_int_equal(sigaction(SIGALRM, &storm, &old), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &every, NULL), 0);
    open_ipc(&f, 2);
    for (uint32_t seed = 1; seed <= 30; seed++)
        round_is_right(&f, seed);
    fleet_close(&f);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(n_alarms > 0);
}

/* ---- fork ---- */

/* What a child does with what it inherited. */
static void use_trainer(fleet *f)
{
    if (ferry_trainer_send_weights(f->trainer, NULL) != FERRY_ENOTSUP)
        _exit(1);
}

static void shut_trainer(fleet *f)
{
    ferry_trainer_shutdown(&f->trainer);
}

static void just_leave(fleet *f)
{
    (void)f;
}

static void a_forked_child_cannot_spoil_its_parents_rounds(void **state)
{
    static void (*const children[])(fleet *) = {just_leave, use_trainer,
                                                shut_trainer};
    fleet f;

    (void)state;
    if (fleet_unavailable("ipc") != NULL)
        skip();
    open_ipc(&f, 2);
    round_is_right(&f, 1);
    for (uint32_t i = 0; i < 3; i++) {
        int status;
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0) {
            alarm(10);
            children[i](&f);
            _exit(0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            fail_msg("child %u: status 0x%x", i, (unsigned)status);
        round_is_right(&f, i + 2);
    }
    fleet_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_process_is_left_as_it_was),
        cmocka_unit_test(a_peer_that_hangs_up_is_an_error_and_no_signal),
        cmocka_unit_test(a_storm_of_signals_disturbs_no_round),
        cmocka_unit_test(a_forked_child_cannot_spoil_its_parents_rounds),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
