/* SPDX-License-Identifier: Apache-2.0 */
/* What people and monitors look at: the page, and what the status and the
 * metrics say of the server as it stands.
 * Invariant: answers in every state and changes nothing. */
#ifndef FERRY_SERVE_PAGE_H
#define FERRY_SERVE_PAGE_H

#include "serve/http.h"

/* GET /ferry/: the page itself, which holds no data. */
void ferry__page_handle(ferry__exchange *x);
/* Adds the running round and the history to a status: the last 16 rounds in
 * short, or the last N whole where the query asks for history=N. The work of
 * the ranks by time ("spans") stays where it asks for spans=1. */
void ferry__page_status(ferry__exchange *x, json_t *status);
/* Metrics of what is, rather than of what happened. */
void ferry__page_metrics(ferry__server *s, ferry__str *out);

#endif
