/* SPDX-License-Identifier: Apache-2.0 */
/* Which providers there are. `tcp` is part of libferry; the others are
 * modules and are opened when they are first asked for.
 * Invariant: a module's table is checked before it is handed out. */
#include "comm/provider.h"

#include "base/log.h"
#include "comm/comm_fault.h"
#include "core/module.h"

#include <stdio.h>
#include <string.h>

static const char *const names[] = {"tcp", "ucx", "nccl"};

#define N_NAMES (sizeof(names) / sizeof(names[0]))

const char *ferry__provider_name(size_t index)
{
    return index < N_NAMES ? names[index] : NULL;
}

static bool is_known(const char *name)
{
    for (size_t i = 0; i < N_NAMES; i++) {
        if (strcmp(name, names[i]) == 0)
            return true;
    }
    return false;
}

static ferry_status find_module(const char *name, const ferry__provider **out)
{
    const ferry__provider *p;
    ferry__provider_entry_fn entry;
    char module[64];
    void *symbol;

    snprintf(module, sizeof(module), "ferry_comm_%s", name);
    if (!ferry__module_present(module))
        return ferry_fail(FERRY_EBACKEND,
                          "provider %s: module %s.so is not installed (Ferry "
                          "was built without what it needs)",
                          name, module);
    FERRY_TRY(ferry__module_symbol(module, FERRY__PROVIDER_ENTRY, &symbol));
    memcpy(&entry, &symbol, sizeof(entry));
    p = entry();
    if (!p || p->size < sizeof(*p) || !p->name || strcmp(p->name, name) != 0 ||
        !p->available || !p->open)
        return ferry_fail(FERRY_EBACKEND,
                          "provider %s: module %s.so gave no table of this "
                          "version",
                          name, module);
    *out = p;
    return FERRY_OK;
}

ferry_status ferry__provider_find(const char *name, const ferry__provider **out)
{
    if (!name || !is_known(name))
        return ferry_fail(FERRY_EUNKNOWN,
                          "provider \"%s\" is not known, there are tcp, ucx "
                          "and nccl",
                          name ? name : "");
    if (strcmp(name, ferry__provider_tcp.name) == 0) {
        *out = &ferry__provider_tcp;
        return FERRY_OK;
    }
    return find_module(name, out);
}

ferry_status ferry__group_open(const ferry__provider *provider,
                               ferry__store *store, const ferry__group *group,
                               ferry__comm **out)
{
    ferry__comm *comm = NULL;
    ferry_status status;

    FERRY_TRY(provider->open(store, group, &comm));
    status = ferry__comm_fault_wrap(&comm);
    if (status < 0) {
        ferry__comm_close(&comm);
        return status;
    }
    *out = comm;
    return FERRY_OK;
}

const char *ferry__provider_auto(void)
{
    const ferry__provider *ucx;

    /* A module that cannot be opened is no reason to look further: it was
     * not asked for. */
    if (ferry__module_present("ferry_comm_ucx") &&
        find_module("ucx", &ucx) == FERRY_OK && ucx->preferred &&
        ucx->available() == FERRY_OK && ucx->preferred())
        return "ucx";
    return "tcp";
}
