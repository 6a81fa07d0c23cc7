/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: timeout=600
 * The tcp group's own streams: on one host, between hosts, mixed, and with a
 * rank that the others take for one of their host but that cannot share. */
#include "harness/stream_cases.h"

#include <ferry/status.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char warning[512];

static void keep_warning(ferry_log_level level, const char *line, void *arg)
{
    (void)arg;
    if (level == FERRY_LOG_WARN)
        snprintf(warning, sizeof(warning), "%s", line);
}

/* Rank 1 is cut off as `cut` does; the group's connections stay. */
static ferry_status open_apart(ferry__comm *c,
                               const ferry__stream_options *options,
                               ferry__stream **out, int (*cut)(void))
{
    ferry_log_set(keep_warning, NULL);
    if (c->rank == 1 && cut() != 0)
        return ferry_fail(FERRY_EIO, "rank 1 cannot be cut off");
    FERRY_TRY(ferry__stream_open(c, options, out));
    if (options->root == 1 || c->world_size < 3)
        return FERRY_OK;
    if (strcmp((*out)->path, "tcp+shared") != 0)
        return ferry_fail(FERRY_EINTERNAL, "path %s", (*out)->path);
    if ((c->rank == 1 || c->rank == options->root) &&
        !strstr(warning, "rank 1 cannot share memory with rank"))
        return ferry_fail(FERRY_EINTERNAL, "nothing was said: %s", warning);
    return FERRY_OK;
}

static int change_network(void)
{
    return unshare(CLONE_NEWNET);
}

static int change_user(void)
{
    return setuid(65534);
}

static ferry_status open_networks(ferry__comm *c,
                                  const ferry__stream_options *options,
                                  ferry__stream **out)
{
    return open_apart(c, options, out, change_network);
}

static ferry_status open_users(ferry__comm *c,
                               const ferry__stream_options *options,
                               ferry__stream **out)
{
    return open_apart(c, options, out, change_user);
}

static bool networks_can_be_made(void)
{
    pid_t pid = fork();
    int how = 1;

    if (pid == 0)
        _exit(change_network() != 0);
    waitpid(pid, &how, 0);
    return how == 0;
}

/* Both need the rights of root. */
static int run_apart(void)
{
    static const stream_maker networks = {.name = "a rank of another network",
                                          .group = &stream_group_one_host,
                                          .open = open_networks,
                                          .world_min = 2,
                                          .fails_in = 3,
                                          .death_ms = 3000};
    static const stream_maker users = {.name = "a rank of another user",
                                       .group = &stream_group_one_host,
                                       .open = open_users,
                                       .world_min = 2,
                                       .fails_in = 3,
                                       .death_ms = 3000};
    int failed = 0;

    if (geteuid() == 0 && networks_can_be_made())
        failed += stream_cases_run(&networks);
    if (geteuid() == 0)
        failed += stream_cases_run(&users);
    return failed;
}

int main(void)
{
    static const stream_maker makers[] = {
        {.name = "tcp's own, one host",
         .group = &stream_group_one_host,
         .open = ferry__stream_open,
         .path = "shared",
         .death_ms = 3000},
        {.name = "tcp's own, hosts of one rank",
         .group = &stream_group_own_hosts,
         .open = ferry__stream_open,
         .path = "tcp",
         .death_ms = 3000},
        {.name = "tcp's own, hosts of two ranks",
         .group = &stream_group_mixed_hosts,
         .open = ferry__stream_open,
         .path = "tcp+shared",
         .world_min = 3,
         .death_ms = 3000},
    };
    int failed = 0;

    for (size_t i = 0; i < sizeof(makers) / sizeof(makers[0]); i++)
        failed += stream_cases_run(&makers[i]);
    return failed + run_apart();
}
