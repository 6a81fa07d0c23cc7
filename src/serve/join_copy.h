/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of a join: asked for in spans, written to the ranks here. */
#ifndef FERRY_SERVE_JOIN_COPY_H
#define FERRY_SERVE_JOIN_COPY_H

#include "base/str.h"
#include "serve/join.h"

#include <jansson.h>

/* One request to the other server; *out is the body. `body` NULL: GET. */
ferry_status ferry__join_ask(ferry__join *j, const char *route,
                             const char *body, ferry__str *out);
/* What rank `rank` of our first replica stores, as ferry__rank_layout. */
ferry_status ferry__join_layout(ferry__server *s, int32_t rank,
                                json_t **out_list);
/* Copies all that the manifest lists to every replica of ours. Under
 * server.control. FERRY_EORDER: the weights changed there meanwhile. */
ferry_status ferry__join_copy(ferry__join *j, const json_t *manifest);

#endif
