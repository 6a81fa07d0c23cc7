/* SPDX-License-Identifier: Apache-2.0 */
/* rl_loop: a policy that learns only because its weights reach the server.
 * Exit status: 0 good, 1 not, 2 wrong arguments, 130 stopped by a signal
 * (with a checkpoint; --resume goes on). */
#include "loop.h"
#include "options.h"
#include "self_test.h"

#include <curl/curl.h>
#include <ggml.h>

#include <stdio.h>
#include <string.h>

static volatile sig_atomic_t stop_asked;

static void on_signal(int number)
{
    (void)number;
    stop_asked = 1;
}

static void catch_signals(void)
{
    struct sigaction a;

    memset(&a, 0, sizeof a);
    a.sa_handler = on_signal;
    a.sa_flags = SA_RESTART;
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
}

static int run(const options *o)
{
    bool good = false;
    ferry_status st;

    catch_signals();
    st = loop_run(o, &stop_asked, &good);
    if (stop_asked) {
        printf("rl_loop: stopped\n");
        return 130;
    }
    if (st < 0 || !good)
        return 1;
    printf("rl_loop: ok\n");
    return 0;
}

int main(int argc, char **argv)
{
    options o;
    int rc;

    if (options_read(argc, argv, &o) < 0) {
        fprintf(stderr, "rl_loop: %s\n", ferry_last_error());
        return 2;
    }
    if (o.help) {
        fputs(options_usage(), stdout);
        return 0;
    }
    if (o.self_test) {
        if (self_test(o.folder) < 0) {
            fprintf(stderr, "rl_loop: %s\n", ferry_last_error());
            return 1;
        }
        printf("rl_loop: ok\n");
        return 0;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    rc = run(&o);
    curl_global_cleanup();
    return rc;
}
