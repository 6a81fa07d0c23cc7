/* SPDX-License-Identifier: Apache-2.0 */
/* The ordinary loader: narrow the tensor to this rank, pick the fused slot,
 * copy. What it records is the load plan of every transport.
 * Invariant: the same name always lands in the same place. */
#include "model/model_state.h"

#include <assert.h>

/* Where one checkpoint parameter lands: `count` rows (dim 0) or columns
 * (dim 1) from `src_first` go to `dst_first` of the slot. */
typedef struct landing {
    size_t slot;
    int32_t dim;
    int64_t src_first, dst_first, count;
} landing;

static ferry__kind kind_of(ferry__role role)
{
    switch (role) {
    case FERRY__ROLE_Q:
    case FERRY__ROLE_K:
    case FERRY__ROLE_V:
        return FERRY__KIND_QKV;
    case FERRY__ROLE_Q_BIAS:
    case FERRY__ROLE_K_BIAS:
    case FERRY__ROLE_V_BIAS:
        return FERRY__KIND_QKV_BIAS;
    case FERRY__ROLE_O:
        return FERRY__KIND_O;
    case FERRY__ROLE_Q_NORM:
        return FERRY__KIND_Q_NORM;
    case FERRY__ROLE_K_NORM:
        return FERRY__KIND_K_NORM;
    case FERRY__ROLE_GATE:
    case FERRY__ROLE_UP:
        return FERRY__KIND_GATE_UP;
    case FERRY__ROLE_DOWN:
        return FERRY__KIND_DOWN;
    case FERRY__ROLE_IN_NORM:
        return FERRY__KIND_IN_NORM;
    default:
        return FERRY__KIND_POST_NORM;
    }
}

static size_t slot_of(const ferry__model *m, ferry__role role, int64_t layer)
{
    size_t index = 0;
    bool found;

    switch (role) {
    case FERRY__ROLE_EMBED:
        return FERRY__EMBED_INDEX;
    case FERRY__ROLE_HEAD:
        return ferry__head_index(m);
    case FERRY__ROLE_NORM:
        return ferry__norm_index(m);
    default:
        found = ferry__layer_param(m, layer, kind_of(role), &index);
        assert(found);
        (void)found;
        return index;
    }
}

static void take(landing *l, int64_t src_first, int64_t dst_first,
                 int64_t count)
{
    l->src_first = src_first;
    l->dst_first = dst_first;
    l->count = count;
}

static void land(const ferry__model *m, ferry__role role, int64_t layer,
                 const int64_t *shape, landing *l)
{
    const ferry__shard *s = &m->shard;
    int64_t kv_first = s->first_kv_head * m->config.head_dim;

    *l = (landing){.slot = slot_of(m, role, layer), .count = shape[0]};
    switch (role) {
    case FERRY__ROLE_EMBED:
    case FERRY__ROLE_HEAD:
        take(l, s->vocab_first, 0, s->vocab_valid);
        break;
    case FERRY__ROLE_Q:
    case FERRY__ROLE_Q_BIAS:
        take(l, s->rank * s->q_rows, 0, s->q_rows);
        break;
    case FERRY__ROLE_K:
    case FERRY__ROLE_K_BIAS:
        take(l, kv_first, s->q_rows, s->kv_rows);
        break;
    case FERRY__ROLE_V:
    case FERRY__ROLE_V_BIAS:
        take(l, kv_first, s->q_rows + s->kv_rows, s->kv_rows);
        break;
    case FERRY__ROLE_GATE:
        take(l, s->rank * s->inter, 0, s->inter);
        break;
    case FERRY__ROLE_UP:
        take(l, s->rank * s->inter, s->inter, s->inter);
        break;
    case FERRY__ROLE_O:
        l->dim = 1;
        take(l, s->rank * s->q_rows, 0, s->q_rows);
        break;
    case FERRY__ROLE_DOWN:
        l->dim = 1;
        take(l, s->rank * s->inter, 0, s->inter);
        break;
    default:
        break;
    }
}

ferry_status ferry__model_load(void *self, ferry_loader *loader,
                               const char *name, const ferry_tensor *tensor)
{
    const ferry__model *m = self;
    ferry_tensor src, dst;
    ferry__role role;
    int64_t layer, shape[2];
    int32_t ndim;
    landing l;

    if (!ferry__role_find(&m->config, name, &role, &layer))
        return ferry_fail(FERRY_EUNKNOWN, "%s has no parameter %s",
                          m->table.name, name);
    if (role == FERRY__ROLE_NONE)
        return FERRY_OK;
    ndim = ferry__role_shape(&m->config, role, shape);
    FERRY_TRY(ferry_loader_expect(loader, tensor, ndim, shape));
    land(m, role, layer, shape, &l);
    FERRY_TRY(ferry_loader_slot(loader, l.slot, &dst));
    FERRY_TRY(ferry_tensor_narrow(tensor, l.dim, l.src_first, l.count, &src));
    FERRY_TRY(ferry_tensor_narrow(&dst, l.dim, l.dst_first, l.count, &dst));
    if (m->config.tied &&
        (role == FERRY__ROLE_EMBED || role == FERRY__ROLE_HEAD))
        return ferry_load_tied(loader, &dst, &src);
    return ferry_load_copy(loader, &dst, &src);
}
