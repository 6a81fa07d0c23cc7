/* SPDX-License-Identifier: Apache-2.0 */
/* The two factories. One mechanism, two tables that share nothing.
 * Invariant: an entry is never removed, and its table, once there, never
 * changes; looking a backend up opens its module outside the lock. */
#include <ferry/registry.h>

#include "base/log.h"
#include "base/alloc.h"
#include "base/str.h"
#include "core/module.h"
#include <ferry/backend.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct registered {
    char name[64];
    char *library, *symbol; /* lazy; NULL when direct */
    const void *ops;        /* NULL until found */
    bool built_in;
} registered;

typedef struct factory {
    pthread_mutex_t lock;
    const char *side;
    const char *default_symbol;
    ferry_status (*check)(const char *name, const void *ops);
    registered *entries;
    size_t count, capacity;
    bool seeded;
} factory;

/* ---- what a table must have ---- */

static ferry_status check_head(const char *name, const char *side, size_t size,
                               size_t size_min, uint32_t abi)
{
    if (abi >> 16 != FERRY_ENGINE_ABI >> 16)
        return ferry_fail(FERRY_EVERSION,
                          "%s engine of backend '%s' has ABI %u.%u, this "
                          "library has %u.%u",
                          side, name, abi >> 16, abi & 0xFFFF,
                          FERRY_ENGINE_ABI >> 16, FERRY_ENGINE_ABI & 0xFFFF);
    if (size < size_min)
        return ferry_fail(FERRY_EINVAL,
                          "%s engine of backend '%s' has a table of %zu "
                          "bytes; at least %zu are needed",
                          side, name, size, size_min);
    return FERRY_OK;
}

static ferry_status check_methods(const char *name, const char *side,
                                  const char *missing)
{
    if (missing != NULL)
        return ferry_fail(FERRY_EINVAL, "%s engine of backend '%s' has no %s",
                          side, name, missing);
    return FERRY_OK;
}

static ferry_status check_trainer(const char *name, const void *table)
{
    const ferry_trainer_engine_ops *o = table;
    const char *missing;

    FERRY_TRY(check_head(name, "trainer", o->size,
                         offsetof(ferry_trainer_engine_ops, destroy) +
                             sizeof(o->destroy),
                         o->abi));
    missing = o->init_type == NULL            ? "init_type"
              : o->init_type->backend == NULL ? "init_type->backend"
              : o->create == NULL             ? "create"
              : o->send == NULL               ? "send"
              : o->destroy == NULL            ? "destroy"
                                              : NULL;
    return check_methods(name, "trainer", missing);
}

static ferry_status check_worker(const char *name, const void *table)
{
    const ferry_worker_engine_ops *o = table;
    const char *missing;

    FERRY_TRY(check_head(name, "worker", o->size,
                         offsetof(ferry_worker_engine_ops, destroy) +
                             sizeof(o->destroy),
                         o->abi));
    missing = o->init_info == NULL              ? "init_info"
              : o->update_info == NULL          ? "update_info"
              : o->create == NULL               ? "create"
              : o->init_transfer_engine == NULL ? "init_transfer_engine"
              : o->start_weight_update == NULL  ? "start_weight_update"
              : o->receive_weights == NULL      ? "receive_weights"
              : o->finish_weight_update == NULL ? "finish_weight_update"
              : o->shutdown == NULL             ? "shutdown"
              : o->destroy == NULL              ? "destroy"
                                                : NULL;
    return check_methods(name, "worker", missing);
}

static factory trainers = {PTHREAD_MUTEX_INITIALIZER,
                           "trainer",
                           FERRY_TRAINER_ENTRY,
                           check_trainer,
                           NULL,
                           0,
                           0,
                           false};
static factory workers = {PTHREAD_MUTEX_INITIALIZER,
                          "worker",
                          FERRY_WORKER_ENTRY,
                          check_worker,
                          NULL,
                          0,
                          0,
                          false};

/* ---- the table, under its lock ---- */

static registered *find_entry(factory *f, const char *name)
{
    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->entries[i].name, name) == 0)
            return &f->entries[i];
    return NULL;
}

static ferry_status add_entry(factory *f, const char *name, const char *library,
                              const char *symbol, const void *ops,
                              bool built_in)
{
    registered *e;

    if (find_entry(f, name) != NULL)
        return ferry_fail(FERRY_EEXIST, "backend '%s' is already registered",
                          name);
    FERRY_TRY(
        ferry__grow(&f->entries, &f->capacity, f->count, sizeof(*f->entries)));
    e = &f->entries[f->count];
    memset(e, 0, sizeof(*e));
    snprintf(e->name, sizeof(e->name), "%s", name);
    e->ops = ops;
    e->built_in = built_in;
    if (library != NULL) {
        e->library = ferry__strdup(library);
        e->symbol = ferry__strdup(symbol);
        if (e->library == NULL || e->symbol == NULL) {
            ferry__free(e->library);
            ferry__free(e->symbol);
            return FERRY_ENOMEM;
        }
    }
    f->count++;
    return FERRY_OK;
}

static ferry_status seed(factory *f)
{
    static const char *const names[] = {"nccl", "ipc", "sparse_nccl",
                                        "sharded_rdt"};
    char module[64];

    if (f->seeded)
        return FERRY_OK;
    /* The built-ins come first; after a failure the next call goes on. */
    for (size_t i = f->count; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(module, sizeof(module), "ferry_%s_%s", names[i], f->side);
        FERRY_TRY(
            add_entry(f, names[i], module, f->default_symbol, NULL, true));
    }
    f->seeded = true;
    return FERRY_OK;
}

static ferry_status check_name(const char *name)
{
    if (name == NULL || name[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "backend name is empty");
    if (strlen(name) >= sizeof(((registered *)0)->name))
        return ferry_fail(FERRY_EINVAL,
                          "backend name of %zu bytes; at most %zu are "
                          "possible",
                          strlen(name), sizeof(((registered *)0)->name) - 1);
    return FERRY_OK;
}

static ferry_status add(factory *f, const char *name, const char *library,
                        const char *symbol, const void *ops)
{
    ferry_status st;

    pthread_mutex_lock(&f->lock);
    st = seed(f);
    if (st == FERRY_OK)
        st = add_entry(f, name, library, symbol, ops, false);
    pthread_mutex_unlock(&f->lock);
    return st;
}

static ferry_status add_direct(factory *f, const char *name, const void *ops)
{
    FERRY_TRY(check_name(name));
    if (ops == NULL)
        return ferry_fail(FERRY_EINVAL, "backend '%s': table is NULL", name);
    FERRY_TRY(f->check(name, ops));
    return add(f, name, NULL, NULL, ops);
}

static ferry_status add_lazy(factory *f, const char *name, const char *library,
                             const char *symbol)
{
    FERRY_TRY(check_name(name));
    if (library == NULL || library[0] == '\0')
        return ferry_fail(FERRY_EINVAL, "backend '%s': library is empty", name);
    return add(f, name, library, symbol != NULL ? symbol : f->default_symbol,
               NULL);
}

static ferry_status unknown(const factory *f, const char *name)
{
    ferry__str known = {0};
    ferry_status st;

    for (size_t i = 0; i < f->count; i++)
        ferry__str_printf(&known, "%s%s", i > 0 ? ", " : "",
                          f->entries[i].name);
    st = ferry_fail(FERRY_EUNKNOWN, "backend '%s' is unknown; known: %s", name,
                    known.data != NULL ? known.data : "");
    ferry__str_free(&known);
    return st;
}

/* The entry as it is now; its strings live for ever. */
static ferry_status look_up(factory *f, const char *name, registered *out)
{
    const registered *e;
    ferry_status st;

    pthread_mutex_lock(&f->lock);
    st = seed(f);
    if (st == FERRY_OK) {
        e = find_entry(f, name);
        if (e == NULL)
            st = unknown(f, name);
        else
            *out = *e;
    }
    pthread_mutex_unlock(&f->lock);
    return st;
}

/* ---- wrappers ---- */

/* "fault:NAME" is NAME behind the fault wrapper, made when it is first asked
 * for; nothing of the wrapper is looked at before. */
#define WRAPPER_PREFIX "fault:"

static bool is_wrapped(const char *name)
{
    return strncmp(name, WRAPPER_PREFIX, sizeof(WRAPPER_PREFIX) - 1) == 0;
}

static bool is_known(factory *f, const char *name)
{
    bool known;

    pthread_mutex_lock(&f->lock);
    known = find_entry(f, name) != NULL;
    pthread_mutex_unlock(&f->lock);
    return known;
}

static ferry_status find(factory *f, const char *name, const void **out_ops);

static ferry_status add_wrapped(factory *f, const char *name)
{
    const char *inner_name = name + sizeof(WRAPPER_PREFIX) - 1;
    ferry_status (*wrap)(const char *, const void *, const void **);
    char module[64], entry[64];
    const void *inner, *ops;
    ferry_status st;
    void *symbol;

    FERRY_TRY(check_name(name));
    if (is_wrapped(inner_name))
        return ferry_fail(FERRY_EINVAL, "backend '%s' is wrapped twice", name);
    FERRY_TRY(find(f, inner_name, &inner));
    snprintf(module, sizeof(module), "ferry_fault_%s", f->side);
    snprintf(entry, sizeof(entry), "ferry_%s_wrap", f->side);
    FERRY_TRY(ferry__module_symbol(module, entry, &symbol));
    memcpy(&wrap, &symbol, sizeof(wrap));
    FERRY_TRY(wrap(name, inner, &ops));
    FERRY_TRY(f->check(name, ops));
    st = add(f, name, NULL, NULL, ops);
    /* Another thread may have been first, with the same table. */
    return st == FERRY_EEXIST ? FERRY_OK : st;
}

/* ---- finding ---- */

static void keep(factory *f, const char *name, const void *ops)
{
    pthread_mutex_lock(&f->lock);
    find_entry(f, name)->ops = ops;
    pthread_mutex_unlock(&f->lock);
}

static ferry_status find(factory *f, const char *name, const void **out_ops)
{
    registered e;
    void *symbol;
    const void *ops;
    const void *(*entry)(void);

    if (name == NULL)
        return ferry_fail(FERRY_EINVAL, "backend name is NULL");
    if (is_wrapped(name) && !is_known(f, name))
        FERRY_TRY(add_wrapped(f, name));
    FERRY_TRY(look_up(f, name, &e));
    if (e.ops == NULL) {
        FERRY_TRY(ferry__module_symbol(e.library, e.symbol, &symbol));
        memcpy(&entry, &symbol, sizeof(entry));
        ops = entry();
        if (ops == NULL)
            return ferry_fail(FERRY_EBACKEND,
                              "module %s: %s gave no engine table", e.library,
                              e.symbol);
        FERRY_TRY(f->check(name, ops));
        keep(f, name, ops);
        e.ops = ops;
    }
    *out_ops = e.ops;
    return FERRY_OK;
}

/* ---- listing ---- */

static void availability(const registered *e, ferry_backend_info *info)
{
    bool bare = e->library != NULL && strchr(e->library, '/') == NULL &&
                strstr(e->library, ".so") == NULL;

    if (e->ops != NULL || e->library == NULL) {
        info->available = 1;
    } else if (bare) {
        info->available = ferry__module_present(e->library);
        if (!info->available)
            snprintf(info->reason, sizeof(info->reason),
                     "module %.160s.so is not installed", e->library);
    } else if (strchr(e->library, '/') != NULL) {
        info->available = access(e->library, R_OK) == 0;
        if (!info->available)
            snprintf(info->reason, sizeof(info->reason), "%.160s is not there",
                     e->library);
    } else {
        snprintf(info->reason, sizeof(info->reason),
                 "%.120s is looked for by the system's loader when first "
                 "used",
                 e->library);
    }
}

static ferry_status list(factory *f, size_t index, ferry_backend_info *out)
{
    ferry_backend_info info = {0};
    registered e;
    ferry_status st;
    size_t size;

    if (out == NULL || out->size < offsetof(ferry_backend_info, reason))
        return ferry_fail(FERRY_EINVAL,
                          "ferry_backend_info of %zu bytes is too small",
                          out != NULL ? out->size : 0);
    size = out->size < sizeof(info) ? out->size : sizeof(info);
    pthread_mutex_lock(&f->lock);
    st = seed(f);
    if (st == FERRY_OK) {
        st = index < f->count ? FERRY_OK : FERRY_DONE;
        if (st == FERRY_OK)
            e = f->entries[index];
    }
    pthread_mutex_unlock(&f->lock);
    if (st != FERRY_OK)
        return st;
    info.size = out->size;
    memcpy(info.name, e.name, sizeof(info.name));
    info.built_in = e.built_in;
    availability(&e, &info);
    memcpy(out, &info, size);
    return FERRY_OK;
}

/* ---- the public names ---- */

ferry_status ferry_trainer_register(const char *backend,
                                    const ferry_trainer_engine_ops *ops)
{
    return add_direct(&trainers, backend, ops);
}

ferry_status ferry_worker_register(const char *backend,
                                   const ferry_worker_engine_ops *ops)
{
    return add_direct(&workers, backend, ops);
}

ferry_status ferry_trainer_register_lazy(const char *backend,
                                         const char *library,
                                         const char *symbol)
{
    return add_lazy(&trainers, backend, library, symbol);
}

ferry_status ferry_worker_register_lazy(const char *backend,
                                        const char *library, const char *symbol)
{
    return add_lazy(&workers, backend, library, symbol);
}

ferry_status ferry_trainer_find(const char *backend,
                                const ferry_trainer_engine_ops **out)
{
    FERRY__NEED(out);
    const void *ops;

    FERRY_TRY(find(&trainers, backend, &ops));
    *out = ops;
    return FERRY_OK;
}

ferry_status ferry_worker_find(const char *backend,
                               const ferry_worker_engine_ops **out)
{
    FERRY__NEED(out);
    const void *ops;

    FERRY_TRY(find(&workers, backend, &ops));
    *out = ops;
    return FERRY_OK;
}

ferry_status ferry_trainer_list(size_t index, ferry_backend_info *out)
{
    FERRY__NEED(out);
    return list(&trainers, index, out);
}

ferry_status ferry_worker_list(size_t index, ferry_backend_info *out)
{
    FERRY__NEED(out);
    return list(&workers, index, out);
}
