/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoint names: the model's prefix maps, and the nearest known name for
 * an unknown one (O-43). Invariant: suggestions cost only when there is an
 * error, and then a bounded amount. */
#include "base/alloc.h"
#include "base/str.h"
#include "core/plan_private.h"
#include <stdio.h>
#include <string.h>

/* Character comparisons spent on finding a suggestion: a few milliseconds. */
#define SUGGEST_WORK ((size_t)20 * 1000 * 1000)
#define NAME_SHOWN   256

static ferry_status join(const char *head, const char *tail, char **out)
{
    size_t a = strlen(head), b = strlen(tail);
    char *text = ferry__alloc(a + b + 1);
    if (!text)
        return FERRY_ENOMEM;
    memcpy(text, head, a);
    memcpy(text + a, tail, b);
    *out = text;
    return FERRY_OK;
}

ferry_status ferry__plan_map_name(const ferry__plan *plan, const char *name,
                                  char **out_name)
{
    const ferry_name_map *maps = plan->model.maps;
    size_t n = maps ? plan->model.n_maps : 0;
    for (size_t i = 0; i < n; i++) {
        if (ferry__starts_with(name, maps[i].from))
            return join(maps[i].to, name + strlen(maps[i].from), out_name);
    }
    for (size_t i = 0; i < n; i++) {
        if (maps[i].to[0] != '\0' && ferry__starts_with(name, maps[i].to)) {
            *out_name = NULL;
            return FERRY_OK;
        }
    }
    return join(name, "", out_name);
}

/* The checkpoint's spelling of a loader's name, cut to the buffer. */
static void unmap_name(const ferry__plan *plan, const char *name, char *out,
                       size_t size)
{
    const ferry_name_map *maps = plan->model.maps;
    for (size_t i = 0; maps && i < plan->model.n_maps; i++) {
        if (ferry__starts_with(name, maps[i].to)) {
            snprintf(out, size, "%s%s", maps[i].from,
                     name + strlen(maps[i].to));
            return;
        }
    }
    snprintf(out, size, "%s", name);
}

/* Edit distance without the common ends, which most names share. */
static size_t distance(const char *a, const char *b, size_t limit, size_t *work)
{
    char x[NAME_SHOWN], y[NAME_SHOWN];
    size_t n = strlen(a), m = strlen(b), head = 0;
    while (head < n && head < m && a[head] == b[head])
        head++;
    a += head;
    b += head;
    n -= head;
    m -= head;
    while (n > 0 && m > 0 && a[n - 1] == b[m - 1]) {
        n--;
        m--;
    }
    *work += head + 1;
    if ((n > m ? n - m : m - n) > limit || n >= NAME_SHOWN || m >= NAME_SHOWN)
        return limit + 1;
    *work += n * m;
    memcpy(x, a, n);
    memcpy(y, b, m);
    x[n] = y[m] = '\0';
    return ferry__edit_distance(x, y, limit);
}

ferry_status ferry__plan_unknown(const ferry__plan *plan, const char *name)
{
    const ferry_model *model = &plan->model;
    char best[NAME_SHOWN] = "", candidate[NAME_SHOWN], meant[NAME_SHOWN];
    size_t limit = strlen(name) / 2 + 2, work = 0;
    /* A loader's own spelling: the checkpoint's one is what was meant. */
    unmap_name(plan, name, meant, sizeof(meant));
    for (size_t i = 0; model->checkpoint_name && work < SUGGEST_WORK; i++) {
        const char *known = model->checkpoint_name(model->self, i);
        if (!known)
            break;
        unmap_name(plan, known, candidate, sizeof(candidate));
        size_t d = strcmp(candidate, meant) == 0
                       ? 0
                       : distance(name, candidate, limit, &work);
        if (d <= limit) {
            memcpy(best, candidate, sizeof(best));
            if (d == 0)
                break;
            limit = d - 1;
        }
    }
    const char *who = model->name ? model->name : "the model";
    if (best[0] == '\0')
        return ferry_fail(FERRY_EUNKNOWN, "parameter %s: not known to %s", name,
                          who);
    return ferry_fail(FERRY_EUNKNOWN,
                      "parameter %s: not known to %s; the nearest known name "
                      "is %s",
                      name, who, best);
}

ferry_status ferry__plan_not_stored(const ferry__plan *plan, const char *name)
{
    const ferry_model *model = &plan->model;
    size_t limit = strlen(name) / 2 + 2, work = 0;
    const char *best = NULL;
    for (size_t i = 0; i < model->n_params && work < SUGGEST_WORK; i++) {
        const ferry_param *p = &model->params[i];
        if (p->flags & FERRY_PARAM_RUNTIME)
            continue;
        size_t d = distance(name, p->name, limit, &work);
        if (d <= limit) {
            best = p->name;
            if (d == 0)
                break;
            limit = d - 1;
        }
    }
    return ferry_fail(FERRY_EUNKNOWN,
                      "parameter %s: the model stores none of this name%s%s",
                      name, best ? "; the nearest is " : "", best ? best : "");
}
