/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks that lines name; see fanout_ranks.h. */
#include "clients/fanout_ranks.h"

#include "clients/client_ops.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define WORD       "rank "
#define WORD_BYTES (sizeof(WORD) - 1)
/* More digits are no rank. */
#define DIGITS_MAX 7

void ferry__fanout_ranks_set(ferry__fanout *f, size_t member, int32_t first,
                             int32_t count)
{
    atomic_store(&f->ranks[member].first, first);
    atomic_store(&f->ranks[member].count, count);
}

static size_t owner_of(const ferry__fanout *f, int32_t rank)
{
    for (size_t i = 0; i < f->count; i++) {
        int32_t first = atomic_load(&f->ranks[i].first);

        if (rank >= first && rank - first < atomic_load(&f->ranks[i].count))
            return i;
    }
    return f->count;
}

/* Whether "replica N " ends at `at`. */
static bool follows_replica(const char *line, const char *at)
{
    static const char word[] = "replica ";
    const size_t n = sizeof(word) - 1;

    if (at == line || *--at != ' ')
        return false;
    while (at > line && isdigit((unsigned char)at[-1]))
        at--;
    return (size_t)(at - line) >= n && memcmp(at - n, word, n) == 0;
}

/* Behind the number of the next rank of the group that is named at or after
 * `at`; NULL where there is none. One that is named already is passed over. */
static const char *next_rank(const char *line, const char *at,
                             int32_t *out_rank)
{
    while ((at = strstr(at, WORD)) != NULL) {
        const char *digits = at + WORD_BYTES;
        size_t n = strspn(digits, "0123456789");
        const char *end = digits + n;
        bool word =
            at == line || !(isalnum((unsigned char)at[-1]) || at[-1] == '_');

        if (word && n > 0 && n <= DIGITS_MAX && !follows_replica(line, at) &&
            !isalnum((unsigned char)*end) && strncmp(end, " (", 2) != 0) {
            *out_rank = (int32_t)strtol(digits, NULL, 10);
            return end;
        }
        at = end;
    }
    return NULL;
}

size_t ferry__fanout_ranks_blame(const ferry__fanout *f, const char *line,
                                 size_t teller)
{
    size_t blamed = f->count;
    int32_t rank;

    for (const char *at = line; (at = next_rank(line, at, &rank)) != NULL;) {
        size_t owner = owner_of(f, rank);

        if (owner != f->count && owner != teller)
            blamed = owner;
    }
    return blamed;
}

void ferry__fanout_ranks_name(const ferry__fanout *f, const char *line,
                              ferry__str *out)
{
    const char *from = line, *at = line;
    int32_t rank;

    while ((at = next_rank(line, at, &rank)) != NULL) {
        size_t owner = owner_of(f, rank);
        const ferry_client *client =
            owner < f->count ? &f->clients[owner] : NULL;

        if (client == NULL)
            continue;
        ferry__str_append_n(out, from, (size_t)(at - from));
        from = at;
        /* One with several servers knows itself which of them it is. */
        if (ferry__client_peers(client) == 1 && ferry__client_peer(client, 0))
            ferry__str_printf(out, " (%s)", ferry__client_peer(client, 0));
        else
            ferry__str_printf(out, " (replica %zu)", owner);
    }
    ferry__str_append(out, from);
}
