/* SPDX-License-Identifier: Apache-2.0 */
/* The digests of an update: what is handed to the digester, how long that
 * took, and each worker's own digests on their way.
 * Invariant: a worker gets one digest for each box that it listed. */
#include "backends/ipc/ipc_trainer_state.h"

#include "base/alloc.h"

struct ipc__digester {
    ipc__trainer *t;
    const ferry__box_lists **lists; /* of the peers */
    ferry__digester *digester;
};

ferry_status ipc__digester_create(ipc__trainer *t, const ipc__chunk *chunk,
                                  ipc__digester **out)
{
    ipc__digester *d = ferry__alloc(sizeof(*d));
    ferry_status status = FERRY_ENOMEM;

    if (!d)
        return FERRY_ENOMEM;
    d->t = t;
    d->lists = ferry__alloc_array(t->n_peers, sizeof(*d->lists));
    if (d->lists) {
        for (size_t p = 0; p < t->n_peers; p++)
            d->lists[p] = &t->peers[p].boxes->lists;
        status = ferry__digester_create(chunk->params, chunk->count, d->lists,
                                        t->n_peers, &d->digester);
    }
    if (status < 0)
        ipc__digester_destroy(&d);
    else
        *out = d;
    return status;
}

void ipc__digester_destroy(ipc__digester **digester)
{
    if (!*digester)
        return;
    ferry__digester_destroy(&(*digester)->digester);
    ferry__free((*digester)->lists);
    ferry__free(*digester);
    *digester = NULL;
}

static void count_time(ipc__trainer *t, int64_t began)
{
    t->host->stats(t->ctx)->digest_ms +=
        (double)(t->host->now_ns() - began) / 1e6;
    FERRY_HOST_SPAN(t->host, t->ctx, "digest", began);
}

void ipc__digester_pack(ipc__digester *d, size_t i, const ferry_tensor *tensor,
                        int64_t first, int64_t count, void *out)
{
    int64_t began = d->t->host->now_ns();

    ferry__digester_pack(d->digester, i, tensor, first, count, out);
    count_time(d->t, began);
}

ferry_status ipc__digester_tensor(ipc__digester *d, size_t i,
                                  const ferry_tensor *tensor)
{
    int64_t began = d->t->host->now_ns();
    ferry_status status = ferry__digester_tensor(d->digester, i, tensor);

    count_time(d->t, began);
    return status;
}

static ferry_status send_to(ipc__digester *d, size_t p)
{
    const ferry__box_lists *list = d->lists[p];
    ferry__ipc_digests v = {d->t->update, list->first[list->n_params], NULL};
    ferry__str s = {0};

    v.items = ferry__alloc_array(v.count, sizeof(*v.items));
    if (!v.items)
        return FERRY_ENOMEM;
    for (size_t i = 0; i < list->n_params; i++) {
        for (size_t b = list->first[i]; b < list->first[i + 1]; b++)
            v.items[b] =
                (ferry__ipc_digest){(uint32_t)i, (uint32_t)(b - list->first[i]),
                                    ferry__digester_value(d->digester, p, b)};
    }
    ferry__ipc_put_digests(&s, &v);
    ferry__free(v.items);
    return ipc__peer_send(d->t, &d->t->peers[p], &s, -1, "sending digests");
}

ferry_status ipc__digester_send(ipc__digester *d)
{
    for (size_t p = 0; p < d->t->n_peers; p++)
        FERRY_TRY(send_to(d, p));
    return FERRY_OK;
}
