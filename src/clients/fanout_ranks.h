/* SPDX-License-Identifier: Apache-2.0 */
/* Which member of a fan-out holds which ranks of the group, and so of whom a
 * line speaks that names a rank.
 * Invariant: "replica 0 rank 1" is a rank within a server, in that server's
 * own words, and none of the group. */
#ifndef FERRY_CLIENTS_FANOUT_RANKS_H
#define FERRY_CLIENTS_FANOUT_RANKS_H

#include "base/str.h"
#include "clients/fanout_call.h"

/* From here on the member holds the ranks from `first` on. Any thread. */
void ferry__fanout_ranks_set(ferry__fanout *f, size_t member, int32_t first,
                             int32_t count);
/* The member that holds the last rank that the line of `teller` names, leaving
 * out the teller's own; f->count where there is none. */
size_t ferry__fanout_ranks_blame(const ferry__fanout *f, const char *line,
                                 size_t teller);
/* The line with the server behind each rank: "rank 2 (http://b) died". */
void ferry__fanout_ranks_name(const ferry__fanout *f, const char *line,
                              ferry__str *out);

#endif
