/* SPDX-License-Identifier: Apache-2.0 */
/* Patterns over parameter names, one rule for every adapter.
 * Invariant: a pattern without '*' is a prefix, one with a '*' is a template
 * of the whole name, and no pattern has two. */
#ifndef FERRY_SOURCES_NAME_PATTERN_H
#define FERRY_SOURCES_NAME_PATTERN_H

#include <ferry/status.h>
#include <stdbool.h>

/* What a template's '*' stood for; `text` points into the name. */
typedef struct ferry__capture {
    const char *text;
    size_t length;
} ferry__capture;

/* FERRY_EINVAL: NULL, or more than one '*'. `what` names the argument. */
ferry_status ferry__pattern_check(const char *what, const char *pattern,
                                  bool *out_has_star);

/* A prefix of the name, or a template of it. */
bool ferry__pattern_matches(const char *pattern, const char *name);

/* The whole name; without '*' it must be equal and the capture is empty. */
bool ferry__template_bind(const char *pattern, const char *name,
                          ferry__capture *out);

/* The pattern with `capture` in place of its '*'. Owned; NULL: no memory. */
char *ferry__template_fill(const char *pattern, const ferry__capture *capture);

/* Owned copies of `count` strings in one array; NULL: no memory. */
char **ferry__strings_copy(const char *const *strings, size_t count);
void ferry__strings_free(char **strings, size_t count);

#endif
