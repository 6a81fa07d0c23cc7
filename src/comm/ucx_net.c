/* SPDX-License-Identifier: Apache-2.0 */
/* A worker of UCX and its endpoints to all other ranks. Addresses travel
 * over the connections on which the ranks have proved that they belong, with
 * a token that every message to this rank must carry.
 * Invariant: UCX never prints, and never ends the process, for a group. */
#include "comm/ucx_private.h"

#include "base/alloc.h"
#include "base/hash.h"
#include "base/log.h"
#include "comm/tcp_tree.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define MAGIC         UINT32_C(0x58435546) /* "FUCX" */
#define VERSION       UINT32_C(2)
#define TOKEN_BITS    40
#define ADDRESS_BYTES ((uint64_t)64 << 10)

/* What every rank tells the others, little-endian, before the addresses.
 * 1. u32 magic  2. u32 version  3. u64 token  4. u64 bytes of the address
 * 5. u64 XXH3-64 of it  6. u32 major and minor version of UCX, 16 bits each
 * 7. u32 0 */
typedef struct card {
    uint32_t magic, version;
    uint64_t token, address_bytes, address_digest;
    uint32_t ucx_version, zero;
} card;

static ferry_status failed(const char *what, ucs_status_t status)
{
    return ferry_fail(FERRY_EBACKEND, "ucx: %s: %s", what,
                      ucs_status_string(status));
}

/* ---- opening ---- */

ferry_status ferry__ucx_context(ucp_context_h *out)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_TAG | UCP_FEATURE_RMA |
                                       UCP_FEATURE_WAKEUP};
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);

    if (status != UCS_OK)
        return failed("its settings cannot be read", status);
    /* Shared memory then takes part although the death of a peer must be an
     * error. A release without this setting goes without shared memory. */
    ucp_config_modify(config, "MM_ERROR_HANDLING", "y");
    status = ucp_init(&params, config, out);
    ucp_config_release(config);
    if (status != UCS_OK)
        return failed("no transport can be used (UCX_TLS?)", status);
    return FERRY_OK;
}

static ferry_status make_worker(ucx__net *n)
{
    ucp_worker_params_t params = {.field_mask =
                                      UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status;

    FERRY_TRY(ferry__ucx_context(&n->context));
    status = ucp_worker_create(n->context, &params, &n->worker);
    if (status != UCS_OK)
        return failed("worker", status);
    status = ucp_worker_get_efd(n->worker, &n->events);
    if (status != UCS_OK)
        return failed("no transport that can be slept on", status);
    return FERRY_OK;
}

static uint32_t ucx_version(void)
{
    unsigned major, minor, release;

    ucp_get_version(&major, &minor, &release);
    return (uint32_t)(major << 16 | minor);
}

static ferry_status check_card(const ucx__net *n, const card *k, int32_t rank)
{
    uint32_t mine = ucx_version();

    if (k->magic != MAGIC)
        return ferry_fail(FERRY_EPEER,
                          "ucx: the card of rank %d is not "
                          "readable",
                          rank);
    if (k->version != VERSION)
        return ferry_fail(FERRY_EVERSION,
                          "ucx: rank %d has protocol version %u, this is %u",
                          rank, k->version, VERSION);
    if (k->address_bytes < 1 || k->address_bytes > ADDRESS_BYTES)
        return ferry_fail(FERRY_EPEER,
                          "ucx: the address of rank %d has %llu bytes, at most "
                          "%llu",
                          rank, (unsigned long long)k->address_bytes,
                          (unsigned long long)ADDRESS_BYTES);
    if (k->ucx_version != mine)
        ferry__log(FERRY_LOG_INFO, "rank %d: ucx %u.%u, rank %d has %u.%u",
                   n->comm->base.rank, mine >> 16, mine & 0xffff, rank,
                   k->ucx_version >> 16, k->ucx_version & 0xffff);
    return FERRY_OK;
}

/* The end of a peer, as UCX sees it. */
static void on_failure(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    ucx__peer *peer = arg;

    (void)ep;
    peer->failed = status;
}

static ferry_status connect_to(ucx__net *n, int32_t rank, const void *address)
{
    ucx__peer *peer = &n->peers[rank];
    ucp_ep_params_t params = {.field_mask =
                                  UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                  UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                  UCP_EP_PARAM_FIELD_ERR_HANDLER,
                              .address = address,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler = {.cb = on_failure, .arg = peer}};
    ucs_status_t status = ucp_ep_create(n->worker, &params, &peer->ep);

    if (status != UCS_OK) {
        peer->ep = NULL;
        return ferry_fail(FERRY_ECONN,
                          "ucx: rank %d cannot reach rank %d: %s "
                          "(UCX_TLS?)",
                          n->comm->base.rank, rank, ucs_status_string(status));
    }
    return FERRY_OK;
}

static int64_t left_of(const ferry__deadline *until)
{
    int64_t left = ferry__deadline_left_ms(until);

    return left > 0 ? left : 1;
}

/* UCX does not check what it is given. */
static ferry_status check_address(const card *k, int32_t rank,
                                  const void *address)
{
    uint64_t digest = ferry__xxh3(address, (size_t)k->address_bytes);

    if (digest == k->address_digest)
        return FERRY_OK;
    return ferry_fail(FERRY_EDIGEST,
                      "ucx: the address of rank %d is damaged: digest %016llx, "
                      "it said %016llx",
                      rank, (unsigned long long)digest,
                      (unsigned long long)k->address_digest);
}

/* Takes the addresses of all ranks, each in `each` bytes, and connects. */
static ferry_status connect_all(ucx__net *n, const card *cards,
                                const void *mine, uint64_t each,
                                const ferry__deadline *until)
{
    ferry__comm *c = &n->comm->base;
    size_t world = (size_t)c->world_size;
    char *all = ferry__alloc_array(world + 1, (size_t)each);
    ferry_status status;

    if (!all)
        return FERRY_ENOMEM;
    memcpy(all + world * each, mine, (size_t)cards[c->rank].address_bytes);
    status = c->ops->all_gather(c, all + world * each, (size_t)each, all,
                                left_of(until));
    for (int32_t r = 0; r < c->world_size && status >= 0; r++)
        status = check_address(&cards[r], r, all + (size_t)r * each);
    for (int32_t r = 0; r < c->world_size && status >= 0; r++) {
        n->peers[r].token = cards[r].token;
        if (r != c->rank)
            status = connect_to(n, r, all + (size_t)r * each);
    }
    ferry__free(all);
    return status;
}

static ferry_status trade(ucx__net *n, const card *mine, const void *address,
                          const ferry__deadline *until)
{
    ferry__comm *c = &n->comm->base;
    card *cards = ferry__alloc_array((size_t)c->world_size, sizeof(*cards));
    uint64_t each = 1;
    ferry_status status;

    if (!cards)
        return FERRY_ENOMEM;
    status = c->ops->all_gather(c, mine, sizeof(*mine), cards, left_of(until));
    for (int32_t r = 0; r < c->world_size && status >= 0; r++) {
        status = check_card(n, &cards[r], r);
        if (cards[r].address_bytes > each)
            each = cards[r].address_bytes;
    }
    if (status >= 0)
        status = connect_all(n, cards, address, each, until);
    ferry__free(cards);
    return status;
}

static ferry_status meet(ucx__net *n, const ferry__deadline *until)
{
    card mine = {.magic = MAGIC, .version = VERSION};
    ucp_address_t *address;
    size_t address_bytes;
    ferry_status status;
    ucs_status_t answer;

    if (getrandom(&n->token, sizeof(n->token), 0) != sizeof(n->token))
        return ferry_fail(FERRY_EIO, "ucx: no random bytes");
    n->token &= (UINT64_C(1) << TOKEN_BITS) - 1;
    answer = ucp_worker_get_address(n->worker, &address, &address_bytes);
    if (answer != UCS_OK)
        return failed("address of the worker", answer);
    mine.token = n->token;
    mine.address_bytes = address_bytes;
    mine.address_digest = ferry__xxh3(address, address_bytes);
    mine.ucx_version = ucx_version();
    status = trade(n, &mine, address, until);
    ucp_worker_release_address(n->worker, address);
    return status;
}

/* ---- the path ---- */

static void add_path(ucx__net *n, const char *name, size_t size)
{
    size_t used = strlen(n->path);
    char *at = n->path;

    while ((at = memmem(at, strlen(at), name, size))) {
        if ((at[size] == '\0' || at[size] == '+') &&
            (at == n->path || at[-1] == '+' || at[-1] == ' '))
            return;
        at++;
    }
    if (used + size + 2 > sizeof(n->path))
        return;
    snprintf(n->path + used, sizeof(n->path) - used, "%c%.*s",
             strchr(n->path, ' ') ? '+' : ' ', (int)size, name);
}

/* Lines as "lane[0]:  3:posix/memory.0 md[2] …" name the transports. */
static void read_lanes(ucx__net *n, char *text)
{
    char *rest = text, *line;

    while ((line = strtok_r(rest, "\n", &rest))) {
        const char *name = strstr(line, "lane["), *end;

        name = name ? strstr(name, "]:") : NULL;
        name = name ? strchr(name + 2, ':') : NULL;
        end = name ? strchr(name, '/') : NULL;
        if (end && end - name < 32)
            add_path(n, name + 1, (size_t)(end - name - 1));
    }
}

static void find_path(ucx__net *n)
{
    snprintf(n->path, sizeof(n->path), "ucx");
    for (int32_t r = 0; r < n->comm->base.world_size; r++) {
        size_t size = 0;
        char *text = NULL;
        FILE *file;

        if (!n->peers[r].ep)
            continue;
        file = open_memstream(&text, &size);
        if (!file)
            return;
        ucp_ep_print_info(n->peers[r].ep, file);
        fclose(file);
        read_lanes(n, text);
        free(text);
    }
}

/* ---- life ---- */

static ferry_status open_net(ucx__net *n, const ferry__deadline *until)
{
    ferry__comm *c = &n->comm->base;
    ferry_status status;

    n->lanes = ferry__alloc_array(n->n_lanes, sizeof(*n->lanes));
    if (!n->lanes)
        return FERRY_ENOMEM;
    ferry__ucx_inside(true);
    status = make_worker(n);
    if (status >= 0)
        status = meet(n, until);
    ferry__ucx_inside(false);
    FERRY_TRY(status);
    FERRY_TRY(ferry__ucx_start_mover(n));
    /* From here on UCX carries. Every pair of ranks speaks once, so that one
     * which cannot is known now. */
    n->comm->carrier_state = n;
    n->comm->carrier = &ferry__ucx_bearer;
    FERRY_TRY(c->ops->barrier(c, left_of(until)));
    ferry__ucx_begin_call(n);
    find_path(n);
    ferry__ucx_end_call(n);
    return FERRY_OK;
}

ferry_status ferry__ucx_net_open(tcp__comm *c, const ferry__deadline *until,
                                 ucx__net **out)
{
    ucx__net *n = ferry__alloc(sizeof(*n));
    ferry_status status;

    if (!n)
        return FERRY_ENOMEM;
    n->comm = c;
    n->events = n->stop = -1;
    n->n_lanes = (size_t)c->base.world_size * 2 + FERRY__TREE_CHILDREN + 1;
    pthread_mutex_init(&n->lock, NULL);
    status = open_net(n, until);
    if (status < 0) {
        char line[1024];

        snprintf(line, sizeof(line), "%s", ferry_last_error());
        c->carrier = NULL;
        ferry__ucx_net_close(n);
        return ferry__fail_line(status, line);
    }
    *out = n;
    return FERRY_OK;
}

void ferry__ucx_net_close(ucx__net *n)
{
    ferry__ucx_stop_mover(n);
    n->comm->carrier_state = n;
    if (n->worker) {
        if (n->comm->failed >= 0 && !atomic_load(&n->comm->aborted))
            ferry__ucx_flush(n);
        ferry__ucx_bearer.drop(n->comm);
    }
    ferry__ucx_inside(true);
    while (n->exposed)
        ferry__ucx_unexpose(&n->comm->base, n->exposed->bytes);
    if (n->worker)
        ucp_worker_destroy(n->worker);
    if (n->context)
        ucp_cleanup(n->context);
    ferry__ucx_inside(false);
    n->comm->carrier_state = NULL;
    pthread_mutex_destroy(&n->lock);
    ferry__free(n->lanes);
    ferry__free(n);
}
