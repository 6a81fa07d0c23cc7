/* SPDX-License-Identifier: Apache-2.0 */
/* JSON from outside, read strictly.
 * Invariant: the text's length and depth are known to be in bounds before
 * the recursive parser sees it. Values are not quoted in error lines, since
 * they may be secrets; keys are. */
#include "base/json.h"

#include <string.h>

#define KEY_SHOWN 120

/* Depth of brackets outside of strings. On text that is no JSON the number
 * means little, but the parser refuses such text where it goes wrong. */
static bool too_deep(const char *text, size_t length)
{
    size_t depth = 0;
    bool in_string = false;

    for (size_t i = 0; i < length; i++) {
        char c = text[i];

        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > FERRY__JSON_DEPTH_MAX)
                return true;
        } else if ((c == ']' || c == '}') && depth > 0) {
            depth--;
        }
    }
    return false;
}

/* The parser's text ends in "near 'TOKEN'"; a repeated key is that token. */
static ferry_status parse_error(const char *what, const json_error_t *error)
{
    const char *near = strstr(error->text, " near '");
    int n = near ? (int)(near - error->text) : (int)strlen(error->text);

    if (json_error_code(error) == json_error_duplicate_key && near) {
        const char *key = near + strlen(" near '");
        int key_n = (int)strlen(key);

        if (key_n > 0 && key[key_n - 1] == '\'')
            key_n--;
        if (key_n > 1 && key[0] == '"' && key[key_n - 1] == '"') {
            key++;
            key_n -= 2;
        }
        return ferry_fail(FERRY_EINVAL,
                          "%s: repeated key '%.*s' at line %d, column %d", what,
                          key_n < KEY_SHOWN ? key_n : KEY_SHOWN, key,
                          error->line, error->column);
    }
    return ferry_fail(FERRY_EINVAL, "%s: line %d, column %d: %.*s", what,
                      error->line, error->column, n, error->text);
}

ferry_status ferry__json_parse(const char *what, const char *text,
                               size_t length, json_t **out_value)
{
    json_error_t error;
    json_t *value;

    if (length > FERRY__JSON_BYTES_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "%s: text of %zu bytes, at most %zu are taken", what,
                          length, FERRY__JSON_BYTES_MAX);
    if (too_deep(text, length))
        return ferry_fail(FERRY_EINVAL, "%s: nested deeper than %d", what,
                          FERRY__JSON_DEPTH_MAX);
    value = json_loadb(text, length, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY,
                       &error);
    if (!value)
        return parse_error(what, &error);
    *out_value = value;
    return FERRY_OK;
}
