/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/http_script.h"

#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

tiny_reply follow(void *arg, const tiny_request *request)
{
    const script *s = arg;

    for (size_t i = 0; i < 8 && s->rules[i].target; i++) {
        if (strncmp(request->target, s->rules[i].target,
                    strlen(s->rules[i].target)) == 0)
            return s->rules[i].reply;
    }
    return (tiny_reply){0};
}

ferry_client open_client(const char *url, int64_t timeout_ms)
{
    ferry_http_options o = FERRY_HTTP_OPTIONS_INIT;
    ferry_client client = {0};

    o.timeout_ms = timeout_ms;
    assert_int_equal(ferry_client_http(url, &o, &client), FERRY_OK);
    return client;
}

void sent(tiny_http *s, int index, const char *method, const char *target,
          const char *body)
{
    const tiny_request *r = tiny_http_request(s, index);

    assert_non_null(r);
    assert_string_equal(r->method, method);
    assert_string_equal(r->target, target);
    assert_string_equal(r->body, body);
    assert_string_equal(r->content_type, body[0] ? "application/json" : "");
}

void line_has(const char *text)
{
    if (!strstr(ferry_last_error(), text)) {
        print_error("'%s' is not in '%s'\n", text, ferry_last_error());
        fail();
    }
}
