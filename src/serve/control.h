/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the weight calls share.
 * Invariant: all but ferry__control_is_prepared run under server.control. */
#ifndef FERRY_SERVE_CONTROL_H
#define FERRY_SERVE_CONTROL_H

#include "serve/server.h"

/* Books the end of the open round and opens its gates. `line` is why it
 * failed, NULL when it did not. After a failure the ranks are asked whether
 * they may serve; after success their statuses were taken. */
void ferry__control_round_end(ferry__server *s, bool finished,
                              const char *line);
/* A failed round: every rank lets go of it. Keeps the recorded line. */
ferry_status ferry__control_round_failed(ferry__server *s, ferry_status st);
/* FERRY_EORDER in `words`, for a call that needs an open round where there is
 * none; says why the last one ended, if it failed. */
ferry_status ferry__control_no_round(ferry__server *s, const char *words);
/* Sets the label; no other effect. */
void ferry__control_label(ferry__server *s, const char *version);
/* As ferry__control_checksums, from inside a call. */
ferry_status ferry__control_checksums_inside(ferry__server *s, char **out_json);
/* Between a prepare that worked and the end of the round. Any thread. */
bool ferry__control_is_prepared(ferry__server *s);

#endif
