/* SPDX-License-Identifier: Apache-2.0 */
/* Patterns over parameter names: check, match, bind, fill. */
#include "sources/name_pattern.h"

#include "base/alloc.h"
#include "base/str.h"

#include <string.h>

ferry_status ferry__pattern_check(const char *what, const char *pattern,
                                  bool *out_has_star)
{
    const char *star;

    if (!pattern)
        return ferry_fail(FERRY_EINVAL, "%s: got NULL, want a name pattern",
                          what);
    star = strchr(pattern, '*');
    if (star && strchr(star + 1, '*'))
        return ferry_fail(FERRY_EINVAL, "%s: \"%s\" has more than one '*'",
                          what, pattern);
    *out_has_star = star != NULL;
    return FERRY_OK;
}

bool ferry__pattern_matches(const char *pattern, const char *name)
{
    if (strchr(pattern, '*'))
        return ferry__match(pattern, name);
    return ferry__starts_with(name, pattern);
}

bool ferry__template_bind(const char *pattern, const char *name,
                          ferry__capture *out)
{
    const char *star = strchr(pattern, '*');

    if (!ferry__match(pattern, name))
        return false;
    out->text = star ? name + (star - pattern) : "";
    out->length = star ? strlen(name) - (strlen(pattern) - 1) : 0;
    return true;
}

char *ferry__template_fill(const char *pattern, const ferry__capture *capture)
{
    const char *star = strchr(pattern, '*');
    size_t head, tail;
    char *out;

    if (!star)
        return ferry__strdup(pattern);
    head = (size_t)(star - pattern);
    tail = strlen(star + 1);
    out = ferry__alloc(head + capture->length + tail + 1);
    if (!out)
        return NULL;
    memcpy(out, pattern, head);
    memcpy(out + head, capture->text, capture->length);
    memcpy(out + head + capture->length, star + 1, tail);
    return out;
}

char **ferry__strings_copy(const char *const *strings, size_t count)
{
    char **out = ferry__alloc_array(count, sizeof(*out));

    for (size_t i = 0; out && i < count; i++) {
        out[i] = ferry__strdup(strings[i]);
        if (!out[i]) {
            ferry__strings_free(out, count);
            out = NULL;
        }
    }
    return out;
}

void ferry__strings_free(char **strings, size_t count)
{
    for (size_t i = 0; strings && i < count; i++)
        ferry__free(strings[i]);
    ferry__free(strings);
}
