/* SPDX-License-Identifier: Apache-2.0 */
/* What a status must be; the library's own line is shown where it is not.
 * Included after cmocka.h. */
#ifndef FERRY_TESTS_EXPECT_H
#define FERRY_TESTS_EXPECT_H

#include <ferry/status.h>

#include <string.h>

#define ok(status) expect_ok((status), __FILE__, __LINE__)

/* `words` are some of the line that is expected. */
#define refused(status, want, words)                                           \
    expect_refused((status), (want), (words), __FILE__, __LINE__)

static inline void expect_ok(ferry_status st, const char *file, int line)
{
    if (st == FERRY_OK)
        return;
    print_error("%s: %s\n", ferry_status_name(st), ferry_last_error());
    _fail(file, line);
}

static inline void expect_refused(ferry_status st, ferry_status want,
                                  const char *words, const char *file, int line)
{
    if (st == want && strstr(ferry_last_error(), words) != NULL)
        return;
    print_error("%s, not %s with \"%s\": %s\n", ferry_status_name(st),
                ferry_status_name(want), words, ferry_last_error());
    _fail(file, line);
}

#endif
