/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `ucx`: RDMA where there is any, and what else UCX can do. UCX
 * reads its own environment (UCX_TLS, UCX_NET_DEVICES, …).
 * Invariant: the program's signal handlers and its log stay its own. */
#include "comm/provider.h"
#include "comm/ucx_private.h"

#include "base/log.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#define DEVICES "/sys/class/infiniband"

/* ---- UCX within a program ---- */

static _Thread_local int inside;

void ferry__ucx_inside(bool yes)
{
    inside += yes ? 1 : -1;
}

static ucs_log_func_rc_t on_log(const char *file, unsigned line,
                                const char *function, ucs_log_level_t level,
                                const ucs_log_component_config_t *config,
                                const char *message, va_list args)
{
    char text[512];

    (void)file;
    (void)line;
    (void)function;
    (void)config;
    if (inside <= 0)
        return UCS_LOG_FUNC_RC_CONTINUE;
    vsnprintf(text, sizeof(text), message, args);
    /* A lost peer is an error to UCX; here it is what a call answers. */
    ferry__log(level <= UCS_LOG_LEVEL_WARN ? FERRY_LOG_INFO : FERRY_LOG_DEBUG,
               "ucx: %s", text);
    return UCS_LOG_FUNC_RC_STOP;
}

static void settle(void)
{
    static const int signals[] = {SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV};

    ucs_log_push_handler(on_log);
    ferry__ucx_inside(true);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        ucs_debug_disable_signal(signals[i]);
    ferry__ucx_inside(false);
}

/* ---- what this machine has ---- */

static ferry_status available(void)
{
    unsigned major, minor, release;

    ucp_get_version(&major, &minor, &release);
    if (major != UCP_API_MAJOR || minor < UCP_API_MINOR)
        return ferry_fail(FERRY_EBACKEND,
                          "provider ucx: UCX is %u.%u here, Ferry was built "
                          "with %d.%d",
                          major, minor, UCP_API_MAJOR, UCP_API_MINOR);
    return FERRY_OK;
}

static bool has_devices(void)
{
    DIR *folder = opendir(DEVICES);
    const struct dirent *entry;
    bool found = false;

    if (!folder)
        return false;
    while (!found && (entry = readdir(folder)))
        found = entry->d_name[0] != '.';
    closedir(folder);
    return found;
}

/* Lines as "resource 4 : md 3 dev 2 flags -- rc_mlx5/mlx5_0:1". */
static bool names_rdma(const char *text)
{
    static const char *const kinds[] = {"-- rc_",  "-- dc_",  "-- ud_",
                                        "-- gga_", "-- srd_", "-- ugni_"};

    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        if (strstr(text, kinds[i]))
            return true;
    }
    return false;
}

/* The devices are looked for first: to ask UCX opens them. */
static bool preferred(void)
{
    ucp_context_h context;
    char *text = NULL;
    size_t size = 0;
    bool found = false;
    FILE *file;

    if (!has_devices())
        return false;
    ferry__ucx_inside(true);
    if (ferry__ucx_context(&context) >= 0) {
        file = open_memstream(&text, &size);
        if (file) {
            ucp_context_print_info(context, file);
            fclose(file);
            found = names_rdma(text);
        }
        free(text);
        ucp_cleanup(context);
    }
    ferry__ucx_inside(false);
    return found;
}

/* ---- groups ---- */

static void ucx_close(ferry__comm *comm)
{
    tcp__comm *c = (tcp__comm *)comm;

    /* The others learn that this rank leaves before UCX tells them. */
    ferry__tcp_tell(c, TCP__LEFT, FERRY_OK, "");
    if (c->carrier_state)
        ferry__ucx_net_close(c->carrier_state);
    ferry__tcp_close(comm);
}

static void ucx_describe(ferry__comm *comm, char *out, size_t size_bytes)
{
    const ucx__net *n = ((tcp__comm *)comm)->carrier_state;

    snprintf(out, size_bytes, "%s", n->path);
}

static ferry__comm_ops ops;

static ferry_status attach(ferry__comm *comm, const ferry__group *group,
                           const ferry__deadline *until)
{
    tcp__comm *c = (tcp__comm *)comm;
    ucx__net *n;

    comm->check = group->check;
    comm->check_arg = group->check_arg;
    FERRY_TRY(ferry__ucx_net_open(c, until, &n));
    comm->check = NULL;
    comm->check_arg = NULL;
    ferry__log(FERRY_LOG_INFO, "rank %d of %d: comm %s", comm->rank,
               comm->world_size, n->path);
    return FERRY_OK;
}

static ferry_status open_group(ferry__store *store, const ferry__group *group,
                               ferry__comm **out)
{
    ferry__deadline until = ferry__deadline_in(group->timeout_ms);
    ferry__comm *comm = NULL;
    ferry_status status;

    if (group->meeting != FERRY__MEET_FERRY)
        return ferry_fail(FERRY_ENOTSUP,
                          "provider ucx: ranks that are not Ferry");
    FERRY_TRY(ferry__provider_tcp.open(store, group, &comm));
    comm->ops = &ops;
    status = attach(comm, group, &until);
    if (status < 0) {
        char line[1024];

        snprintf(line, sizeof(line), "%s", ferry_last_error());
        ferry__tcp_tell((tcp__comm *)comm, TCP__FAILED, status, line);
        ferry__comm_close(&comm);
        return ferry__fail_line(status, line);
    }
    *out = comm;
    return FERRY_OK;
}

static const ferry__provider provider = {
    .size = sizeof(ferry__provider),
    .name = "ucx",
    .available = available,
    .preferred = preferred,
    .open = open_group,
};

static void begin(void)
{
    settle();
    ops = ferry__tcp_ops;
    ops.provider = "ucx";
    ops.close = ucx_close;
    ops.expose = ferry__ucx_expose;
    ops.unexpose = ferry__ucx_unexpose;
    ops.pull = ferry__ucx_pull;
    ops.stream_open = NULL; /* whole buffers */
    ops.describe = ucx_describe;
}

const ferry__provider *ferry__provider_entry(void);

const ferry__provider *ferry__provider_entry(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, begin);
    return &provider;
}
