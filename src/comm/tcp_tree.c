/* SPDX-License-Identifier: Apache-2.0 */
/* Two levels: the leaders of all hosts, and the ranks of each host behind
 * their leader. The root leads its host; elsewhere the lowest rank does.
 * Invariant: both levels are ordered alike on all ranks. */
#include "comm/tcp_tree.h"

static bool leads(int32_t r, int32_t root, const uint64_t *host_ids)
{
    if (host_ids[r] == host_ids[root])
        return r == root;
    for (int32_t q = 0; q < r; q++) {
        if (host_ids[q] == host_ids[r])
            return false;
    }
    return true;
}

/* The line that `rank` stands in at one level, its own place in it, and the
 * rank at each place; the first is the one that has the bytes first. */
typedef struct line {
    int32_t count, place;
    int32_t rank, world_size, root;
    const uint64_t *host_ids;
    bool of_leaders;
} line;

static bool in_line(const line *l, int32_t r)
{
    bool leader = leads(r, l->root, l->host_ids);

    return l->of_leaders ? leader && r != l->root
                         : !leader && l->host_ids[r] == l->host_ids[l->rank];
}

static int32_t first_of(const line *l)
{
    if (l->of_leaders)
        return l->root;
    for (int32_t r = 0; r < l->world_size; r++) {
        if (l->host_ids[r] == l->host_ids[l->rank] &&
            leads(r, l->root, l->host_ids))
            return r;
    }
    return l->root;
}

static int32_t rank_at(const line *l, int32_t place)
{
    int32_t at = 0;

    if (place == 0)
        return first_of(l);
    for (int32_t r = 0; r < l->world_size; r++) {
        if (in_line(l, r) && ++at == place)
            return r;
    }
    return -1;
}

static void count_line(line *l)
{
    l->count = 1;
    l->place = 0;
    for (int32_t r = 0; r < l->world_size; r++) {
        if (!in_line(l, r))
            continue;
        if (r == l->rank)
            l->place = l->count;
        l->count++;
    }
}

static void add_child(ferry__tree *out, int32_t rank)
{
    out->children[out->n_children++] = rank;
}

static void add_line(const line *l, bool chain, ferry__tree *out)
{
    int32_t bit = 1;

    if (chain) {
        if (l->place > 0)
            out->parent = rank_at(l, l->place - 1);
        if (l->place + 1 < l->count)
            add_child(out, rank_at(l, l->place + 1));
        return;
    }
    /* Binomial: the parent's place lacks the lowest bit of one's own; the
     * children have one bit more, below that. The largest part goes first. */
    while (l->place > 0 ? !(l->place & bit) : bit < l->count)
        bit <<= 1;
    if (l->place > 0)
        out->parent = rank_at(l, l->place & ~bit);
    for (bit >>= 1; bit > 0; bit >>= 1) {
        if ((l->place | bit) < l->count)
            add_child(out, rank_at(l, l->place | bit));
    }
}

void ferry__tree_make(int32_t rank, int32_t world_size, int32_t root,
                      const uint64_t *host_ids, bool chain, ferry__tree *out)
{
    line l = {.rank = rank,
              .world_size = world_size,
              .root = root,
              .host_ids = host_ids};

    out->parent = -1;
    out->n_children = 0;
    if (leads(rank, root, host_ids)) {
        l.of_leaders = true;
        count_line(&l);
        add_line(&l, chain, out);
        l.of_leaders = false;
    }
    count_line(&l);
    add_line(&l, chain, out);
}
