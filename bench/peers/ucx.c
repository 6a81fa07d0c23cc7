/* SPDX-License-Identifier: Apache-2.0 */
/* A party of `bench broadcast`: plain UCX tag sends, each tensor to each
 * worker, all at once, over what UCX finds by itself (UCX_TLS steers it).
 * Invariant: ranks yield while they wait and sleep between rounds. */
#define _GNU_SOURCE
#include <ucp/api/ucp.h>

#include "party.h"

typedef struct ucx {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h to[PARTY_WORKERS + 1]; /* root */
    void **requests;
    size_t n;
} ucx;

static void must(ucs_status_t status, const char *what)
{
    if (status != UCS_OK)
        party_die("%s: %s", what, ucs_status_string(status));
}

static void keep(ucx *u, void *request, const char *what)
{
    if (UCS_PTR_IS_ERR(request))
        party_die("%s: %s", what, ucs_status_string(UCS_PTR_STATUS(request)));
    if (request)
        u->requests[u->n++] = request;
}

static void wait_all(ucx *u)
{
    for (size_t i = 0, idle = 0; i < u->n;) {
        ucs_status_t status = ucp_request_check_status(u->requests[i]);

        if (status == UCS_INPROGRESS) {
            idle = ucp_worker_progress(u->worker) ? 0 : idle + 1;
            if (idle > 200)
                sched_yield();
            continue;
        }
        must(status, "request");
        ucp_request_free(u->requests[i++]);
    }
    u->n = 0;
}

static void send_all(party *p, void *arg)
{
    ucp_request_param_t param = {0};
    ucx *u = arg;

    for (size_t i = 0; i < p->n_tensors; i++) {
        for (int r = 1; r <= p->n_workers; r++)
            keep(u,
                 ucp_tag_send_nbx(u->to[r], p->source + p->tensors[i].at,
                                  p->tensors[i].size, i + 1, &param),
                 "send");
    }
    wait_all(u);
}

static void receive_all(party *p, void *arg)
{
    ucp_request_param_t param = {0};
    ucx *u = arg;

    for (size_t i = 0; i < p->n_tensors; i++)
        keep(u,
             ucp_tag_recv_nbx(u->worker, p->own + p->tensors[i].at,
                              p->tensors[i].size, i + 1, UINT64_MAX, &param),
             "receive");
    wait_all(u);
}

static void open_ucx(party *p, ucx *u)
{
    ucp_params_t cp = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                       .features = UCP_FEATURE_TAG};
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_config_t *config;

    must(ucp_config_read(NULL, NULL, &config), "config");
    must(ucp_init(&cp, config, &u->context), "init");
    ucp_config_release(config);
    must(ucp_worker_create(u->context, &wp, &u->worker), "worker");
    u->requests = malloc((p->n_tensors + 1) * (size_t)p->n_workers *
                         sizeof(*u->requests));
}

/* Each worker gives its address over its link; a first exchange connects. */
static void meet(party *p, ucx *u)
{
    char word = 0;

    if (p->rank > 0) {
        ucp_request_param_t param = {0};
        ucp_address_t *address;
        size_t n;

        must(ucp_worker_get_address(u->worker, &address, &n), "address");
        party_send(p->links[0], &n, sizeof(n));
        party_send(p->links[0], address, n);
        ucp_worker_release_address(u->worker, address);
        keep(u, ucp_tag_recv_nbx(u->worker, &word, 1, 0, UINT64_MAX, &param),
             "first word");
        wait_all(u);
        return;
    }
    for (int r = 1; r <= p->n_workers; r++) {
        ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS};
        ucp_request_param_t param = {0};
        size_t n;
        void *address;

        if (!party_recv(p->links[r], &n, sizeof(n)))
            party_die("worker %d is gone", r);
        address = malloc(n);
        if (!party_recv(p->links[r], address, n))
            party_die("worker %d is gone", r);
        ep.address = address;
        must(ucp_ep_create(u->worker, &ep, &u->to[r]), "endpoint");
        keep(u, ucp_tag_send_nbx(u->to[r], &word, 1, 0, &param), "first word");
        wait_all(u);
        free(address);
    }
}

int main(int argc, char **argv)
{
    ucx u = {0};
    party p;

    party_arguments(&p, argc, argv);
    if (party_fork(&p) > 0)
        party_open_own(&p);
    else
        party_open_source(&p);
    open_ucx(&p, &u);
    meet(&p, &u);
    if (p.rank > 0)
        party_work(&p, receive_all, &u);
    else
        party_lead(&p, send_all, &u);
    return 0;
}
