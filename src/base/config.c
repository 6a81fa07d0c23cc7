/* SPDX-License-Identifier: Apache-2.0 */
/* Settings of the library and the program, by row.
 * Invariant: a value that ferry__config_get returned stays readable for the
 * life of the process (the environment's own as long as it is unchanged). */
#include "base/config.h"

#include "base/alloc.h"
#include "base/str.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct row {
    const char *variable, *key, *def, *unit;
} row;

static const row rows[FERRY__CONFIG_COUNT] = {
#define FERRY__CONFIG_ROW(id, key, def, unit, help)                            \
    {"FERRY_" #id, key, def, unit},
    FERRY__CONFIG_TABLE(FERRY__CONFIG_ROW)
#undef FERRY__CONFIG_ROW
};

/* Values that were set, kept for ever: a reader may hold the old one. */
typedef struct kept {
    struct kept *next;
    char text[];
} kept;

static _Atomic(kept *) values;
static _Atomic(const char *) set_by_program[FERRY__CONFIG_COUNT];

/* A unit such as "auto|plain|stream" lists the values that are allowed. */
static bool allowed(const row *r, const char *text)
{
    size_t n = strlen(text);
    const char *word = r->unit;

    if (!strchr(word, '|'))
        return true;
    while (word) {
        const char *bar = strchr(word, '|');
        size_t length = bar ? (size_t)(bar - word) : strlen(word);

        if (length == n && memcmp(word, text, n) == 0)
            return true;
        word = bar ? bar + 1 : NULL;
    }
    return false;
}

const char *ferry__config_get(ferry__config_id id)
{
    const char *text = atomic_load(&set_by_program[id]);

    if (text)
        return text;
    text = getenv(rows[id].variable);
    if (text && *text && allowed(&rows[id], text))
        return text;
    return rows[id].def;
}

const char *ferry__config_foreign(const char *variable)
{
    return getenv(variable);
}

static const char *keep(const char *text)
{
    size_t n = strlen(text);
    kept *v;

    for (v = atomic_load(&values); v; v = v->next) {
        if (strcmp(v->text, text) == 0)
            return v->text;
    }
    v = ferry__alloc(sizeof(*v) + n + 1);
    if (!v)
        return NULL;
    memcpy(v->text, text, n);
    v->next = atomic_load(&values);
    while (!atomic_compare_exchange_weak(&values, &v->next, v))
        continue;
    return v->text;
}

static ferry_status unknown_key(const char *key)
{
    ferry__str list = {0};
    ferry_status status;

    for (size_t i = 0; i < FERRY__CONFIG_COUNT; i++)
        ferry__str_printf(&list, "%s%s", i ? ", " : "", rows[i].key);
    status = ferry_fail(FERRY_EUNKNOWN, "unknown setting '%s'; known: %s", key,
                        list.data ? list.data : "");
    ferry__str_free(&list);
    return status;
}

ferry_status ferry__config_set(const char *key, const char *value)
{
    for (size_t i = 0; i < FERRY__CONFIG_COUNT; i++) {
        const char *copy;

        if (strcmp(rows[i].key, key) != 0)
            continue;
        if (!allowed(&rows[i], value))
            return ferry_fail(FERRY_EINVAL,
                              "setting %s: must be one of %s, got '%s'", key,
                              rows[i].unit, value);
        copy = keep(value);
        if (!copy)
            return FERRY_ENOMEM;
        atomic_store(&set_by_program[i], copy);
        return FERRY_OK;
    }
    return unknown_key(key);
}
