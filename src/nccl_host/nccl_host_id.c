/* SPDX-License-Identifier: Apache-2.0 */
/* The unique id: how the ranks of a group find the store of the process that
 * made it. 128 bytes, little-endian, without padding:
 *   1. 8 bytes "FERRYNID"  2. u32 version, 1  3. u32 4 or 6, the address's
 *   kind  4. u32 port  5. 16 bytes address, network order; IPv4 in the
 *   first four  6. u64 generation  7. 32 characters secret  8. zeros.
 * Invariant: a store lives until this process's rank has its group open, or
 * until nobody can wait for it any more. */
#include "nccl_host/nccl_host.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/socket.h"
#include "comm/rendezvous.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAGIC         "FERRYNID"
#define VERSION       1
#define SECRET_CHARS  32
#define AT_VERSION    8
#define AT_KIND       12
#define AT_PORT       16
#define AT_ADDRESS    20
#define AT_GENERATION 36
#define AT_SECRET     44
#define AT_END        (AT_SECRET + SECRET_CHARS)
#define TIMEOUT_MS    INT64_C(300000)

typedef struct place {
    int32_t port;
    int kind; /* AF_INET, AF_INET6 */
    unsigned char address[16];
    uint64_t generation;
    char secret[SECRET_CHARS + 1];
} place;

typedef struct served {
    struct served *next;
    uint64_t generation;
    ferry__deadline until;
    ferry__store_server *server;
} served;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static served *all_served;

int64_t ferry__nccl_timeout_ms(void)
{
    const char *text = ferry__config_get(FERRY__CONFIG_NCCL_HOST_TIMEOUT_MS);
    char *end;
    long long ms = strtoll(text, &end, 10);

    return *text && !*end && ms > 0 && ms <= INT32_MAX ? ms : TIMEOUT_MS;
}

/* ---- the bytes ---- */

static void put(unsigned char *at, uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        at[i] = (unsigned char)(v >> (8 * i));
}

static uint64_t get(const unsigned char *at, size_t n)
{
    uint64_t v = 0;

    for (size_t i = 0; i < n; i++)
        v |= (uint64_t)at[i] << (8 * i);
    return v;
}

static void write_id(const place *p, ncclUniqueId *out)
{
    unsigned char b[FERRY__NCCL_ID_BYTES] = {0};

    memcpy(b, MAGIC, AT_VERSION);
    put(b + AT_VERSION, VERSION, 4);
    put(b + AT_KIND, p->kind == AF_INET6 ? 6 : 4, 4);
    put(b + AT_PORT, (uint64_t)p->port, 4);
    memcpy(b + AT_ADDRESS, p->address, sizeof(p->address));
    put(b + AT_GENERATION, p->generation, 8);
    memcpy(b + AT_SECRET, p->secret, SECRET_CHARS);
    memcpy(out->internal, b, sizeof(b));
}

static ferry_status read_id(const ncclUniqueId *id, place *out)
{
    unsigned char b[FERRY__NCCL_ID_BYTES];
    uint64_t version, kind, port;

    memcpy(b, id->internal, sizeof(b));
    if (memcmp(b, MAGIC, AT_VERSION) != 0)
        return ferry_fail(FERRY_EINVAL,
                          "the unique id was not made by libferry_nccl_host: "
                          "every rank must bind the same library");
    version = get(b + AT_VERSION, 4);
    if (version != VERSION)
        return ferry_fail(FERRY_EINVAL,
                          "the unique id has version %llu, this library "
                          "reads %d",
                          (unsigned long long)version, VERSION);
    kind = get(b + AT_KIND, 4);
    port = get(b + AT_PORT, 4);
    memset(out, 0, sizeof(*out));
    out->generation = get(b + AT_GENERATION, 8);
    memcpy(out->address, b + AT_ADDRESS, sizeof(out->address));
    memcpy(out->secret, b + AT_SECRET, SECRET_CHARS);
    if ((kind != 4 && kind != 6) || port < 1 || port > 65535 ||
        out->generation == 0 || strlen(out->secret) != SECRET_CHARS)
        return ferry_fail(FERRY_EINVAL,
                          "the unique id is damaged: address kind %llu, "
                          "port %llu",
                          (unsigned long long)kind, (unsigned long long)port);
    out->kind = kind == 6 ? AF_INET6 : AF_INET;
    out->port = (int32_t)port;
    return FERRY_OK;
}

/* ---- making ---- */

/* Where the others reach this process: loopback unless the setting says
 * otherwise, so that nothing is offered to a network by default. */
static ferry_status read_address(const char *text, place *out)
{
    static const unsigned char any[16];

    out->kind = strchr(text, ':') ? AF_INET6 : AF_INET;
    if (inet_pton(out->kind, text, out->address) != 1)
        return ferry_fail(FERRY_EINVAL,
                          "setting nccl_host_address: '%s' is no IPv4 or IPv6 "
                          "address",
                          text);
    if (memcmp(out->address, any, sizeof(any)) == 0)
        return ferry_fail(FERRY_EINVAL,
                          "setting nccl_host_address: '%s' is no address that "
                          "another rank could reach",
                          text);
    return FERRY_OK;
}

static ferry_status random_parts(place *p)
{
    char hex[17];

    FERRY_TRY(ferry__random_hex(p->secret, SECRET_CHARS / 2));
    FERRY_TRY(ferry__random_hex(hex, 8));
    p->generation = strtoull(hex, NULL, 16) | 1;
    return FERRY_OK;
}

/* Stores whose ranks never came, or failed. Called with the lock held. */
static void drop_expired(void)
{
    served **at = &all_served;

    while (*at) {
        served *s = *at;

        if (!ferry__deadline_passed(&s->until)) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        ferry__store_server_close(&s->server);
        ferry__free(s);
    }
}

static ferry_status serve(const char *host, place *p)
{
    served *s = ferry__alloc(sizeof(*s));
    ferry_status status;

    if (!s)
        return FERRY_ENOMEM;
    status = ferry__store_serve(host, 0, &p->port, &s->server);
    if (status < 0) {
        ferry__free(s);
        return status;
    }
    s->generation = p->generation;
    /* A rank may begin to wait as late as another has waited. */
    s->until = ferry__deadline_in(2 * ferry__nccl_timeout_ms());
    pthread_mutex_lock(&lock);
    drop_expired();
    s->next = all_served;
    all_served = s;
    pthread_mutex_unlock(&lock);
    return FERRY_OK;
}

ferry_status ferry__nccl_id_make(ncclUniqueId *out)
{
    const char *host = ferry__config_get(FERRY__CONFIG_NCCL_HOST_ADDRESS);
    place p = {0};

    FERRY_TRY(read_address(host, &p));
    FERRY_TRY(random_parts(&p));
    FERRY_TRY(serve(host, &p));
    write_id(&p, out);
    return FERRY_OK;
}

/* ---- meeting ---- */

/* When this process's rank is connected to all others, all have read the
 * cards of all, and nobody needs the store any more. */
static void stop_serving(uint64_t generation)
{
    served **at = &all_served, *found = NULL;

    pthread_mutex_lock(&lock);
    while (*at && (*at)->generation != generation)
        at = &(*at)->next;
    if (*at) {
        found = *at;
        *at = found->next;
    }
    pthread_mutex_unlock(&lock);
    if (found)
        ferry__store_server_close(&found->server);
    ferry__free(found);
}

static ferry_status open_group(ferry__store *store, const place *p,
                               int32_t rank, int32_t world_size,
                               ferry__comm **out)
{
    char mine[256];
    ferry__rendezvous_tcp r = {
        .base = {.rank = rank,
                 .world_size = world_size,
                 .generation = p->generation,
                 .timeout_ms = ferry__nccl_timeout_ms()},
        /* The way to the store is the way to the other ranks. */
        .host = mine,
        .advertise = mine,
        .host_name = ferry__config_get(FERRY__CONFIG_HOST_NAME),
        .secret = p->secret,
    };

    FERRY_TRY(ferry__store_local_address(store, mine, sizeof(mine)));
    return ferry__rendezvous_tcp_open(store, &r, out);
}

ferry_status ferry__nccl_id_meet(const ncclUniqueId *id, int32_t rank,
                                 int32_t world_size, ferry__comm **out)
{
    char host[INET6_ADDRSTRLEN];
    ferry__store *store;
    ferry_status status;
    place p;

    FERRY_TRY(read_id(id, &p));
    inet_ntop(p.kind, p.address, host, sizeof(host));
    FERRY_TRY(
        ferry__store_open(host, p.port, ferry__nccl_timeout_ms(), &store));
    status = open_group(store, &p, rank, world_size, out);
    ferry__store_close(&store);
    if (status >= 0)
        stop_serving(p.generation);
    return status;
}
