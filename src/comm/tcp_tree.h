/* SPDX-License-Identifier: Apache-2.0 */
/* Who hands a broadcast on to whom.
 * Invariant: the tree is a function of its arguments alone, every rank but
 * the root has one parent, and one rank of each host has its parent on
 * another host. */
#ifndef FERRY_COMM_TCP_TREE_H
#define FERRY_COMM_TCP_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FERRY__TREE_CHILDREN 16

typedef struct ferry__tree {
    int32_t parent; /* -1: the root */
    int32_t n_children;
    int32_t children[FERRY__TREE_CHILDREN]; /* other hosts first */
} ferry__tree;

/* `chain`: every rank feeds at most one rank of another host and one of its
 * own, so that no link carries the bytes twice: for large messages, which
 * flow through all at once. Otherwise binomial: fewest steps. */
void ferry__tree_make(int32_t rank, int32_t world_size, int32_t root,
                      const uint64_t *host_ids, bool chain, ferry__tree *out);

#endif
