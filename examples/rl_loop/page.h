/* SPDX-License-Identifier: Apache-2.0 */
/* One self-contained HTML page of a run: plots, and the numbers in it. */
#ifndef RL_LOOP_PAGE_H
#define RL_LOOP_PAGE_H

#include "history.h"

/* `title` and `note` are plain text. Replaces `path` as a whole. FERRY_EIO
 * names it. */
ferry_status page_write(const history *h, const char *title, const char *note,
                        const char *path);

#endif
