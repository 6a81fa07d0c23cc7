/* SPDX-License-Identifier: Apache-2.0 */
/* The init info that `ferry push` gives its backend.
 * Invariant: a field is said once: a flag and --init-info that both give it
 * are refused, whatever they say. */
#include "cli/cli_push.h"

#include "clients/http_client.h"
#include "comm/tcp_resolve.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define RESOLVE_MS INT64_C(10000)

/* ---- this host, as the servers reach it ---- */

/* The address that packets to `host` leave from; no packet is sent. */
static bool address_towards(const char *host, char *out, size_t size_bytes)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(RESOLVE_MS), "host"};
    struct addrinfo *found = NULL;
    struct sockaddr_storage own;
    socklen_t size = sizeof(own);
    bool got = false;
    int fd;

    if (ferry__tcp_resolve(host, 9, 0, &w, &found) < 0)
        return false;
    fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
        getsockname(fd, (struct sockaddr *)&own, &size) == 0)
        got = getnameinfo((struct sockaddr *)&own, size, out,
                          (socklen_t)size_bytes, NULL, 0, NI_NUMERICHOST) == 0;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(found);
    return got;
}

static bool is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

/* "[::1]:8000" or "a:8000" without brackets and port. */
static void host_of(const char *host_port, char *out, size_t size_bytes)
{
    size_t n =
        host_port[0] == '[' ? strcspn(host_port, "]") : strcspn(host_port, ":");
    size_t skip = host_port[0] == '[';

    snprintf(out, size_bytes, "%.*s", (int)(n - skip), host_port + skip);
}

/* Servers of this host reach it by any of its addresses; the others only by
 * the one on their side. */
static void find_address(const char *const *urls, int count, json_t *info)
{
    char best[256] = "";

    for (int i = 0; i < count && (!best[0] || is_loopback(best)); i++) {
        ferry__http_address parts;
        char host[256], own[256] = "";

        if (ferry__http_address_parse(urls[i], &parts) < 0)
            continue; /* the client will say what is wrong with it */
        host_of(parts.host_port, host, sizeof(host));
        ferry__http_address_free(&parts);
        if (address_towards(host, own, sizeof(own)))
            memcpy(best, own, sizeof(best));
    }
    if (best[0])
        json_object_set_new(info, "master_address", json_string(best));
}

/* ---- flags ---- */

static bool is_nccl(const char *backend)
{
    const char *colon = strrchr(backend, ':');

    return strcmp(colon ? colon + 1 : backend, "nccl") == 0;
}

/* Steals `value`; NULL: the flag was not given. */
static bool set_field(json_t *info, const char *flag, const char *key,
                      json_t *value)
{
    if (!value)
        return true;
    if (json_object_get(info, key)) {
        cli_usage("push", "%s and --init-info both give %s", flag, key);
        json_decref(value);
        return false;
    }
    return json_object_set_new(info, key, value) == 0;
}

static bool set_flags(const cli_push_options *o, json_t *info)
{
    if (o->packed && o->no_packed) {
        cli_usage("push", "--packed and --no-packed are both given");
        return false;
    }
    return set_field(info, "--packed", "packed",
                     o->packed ? json_true() : NULL) &&
           set_field(info, "--no-packed", "packed",
                     o->no_packed ? json_false() : NULL) &&
           set_field(info, "--provider", "provider",
                     o->provider ? json_string(o->provider) : NULL) &&
           set_field(info, "--master-address", "master_address",
                     o->master_address ? json_string(o->master_address)
                                       : NULL) &&
           set_field(info, "--master-port", "master_port",
                     o->master_port >= 0 ? json_integer(o->master_port) : NULL);
}

static json_t *parse_given(const char *text)
{
    json_error_t error;
    json_t *info;

    if (!text)
        return json_object();
    info = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (json_is_object(info))
        return info;
    cli_usage("push", "--init-info takes a JSON object%s%s", info ? "" : ": ",
              info ? "" : error.text);
    json_decref(info);
    return NULL;
}

/* Another rank than 0 sends nothing by itself. */
static bool check_own(const json_t *info)
{
    static const char *const own[] = {"rank", "backend"};

    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        if (json_object_get(info, own[i])) {
            cli_usage("push", "--init-info takes no \"%s\"%s", own[i],
                      own[i][0] == 'b' ? ", --backend says it"
                                       : ": a push is rank 0");
            return false;
        }
    return true;
}

json_t *cli_push_init_info(const cli_push_options *o, const char *const *urls,
                           int count)
{
    json_t *info = parse_given(o->init_info);

    if (!info)
        return NULL;
    if (!check_own(info) || !set_flags(o, info)) {
        json_decref(info);
        return NULL;
    }
    json_object_set_new(info, "rank", json_integer(0));
    if (!json_object_get(info, "deadline_ms"))
        json_object_set_new(info, "deadline_ms",
                            json_integer(o->timeout * 1000));
    if (is_nccl(o->backend) && !json_object_get(info, "master_address"))
        find_address(urls, count, info);
    return info;
}
