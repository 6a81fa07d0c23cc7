/* SPDX-License-Identifier: Apache-2.0 */
/* The page and its data; see page.h. Script and style are in the page, and
 * the policy that is sent with it allows just these two by their digest, so
 * that a text that slipped into it could not run. */
#include "serve/page.h"

#include "base/alloc.h"

#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>

/* A status that nobody asked for more stays small, as clients have buffers of
 * a fixed size for it. */
#define SHORT_HISTORY 16

/* src/serve/page.html, put here by the build; NUL terminated. */
extern const char ferry__page_html[];

static pthread_once_t policy_once = PTHREAD_ONCE_INIT;
static char policy[512];

/* The base64 SHA-256 of what stands between <tag> and </tag>. */
static void digest_of(const char *tag, char out[64])
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    char open[16], close[16];
    const char *from, *to;

    snprintf(open, sizeof open, "<%s>", tag);
    snprintf(close, sizeof close, "</%s>", tag);
    out[0] = '\0';
    from = strstr(ferry__page_html, open);
    to = from == NULL ? NULL : strstr(from, close);
    if (to == NULL)
        return;
    from += strlen(open);
    SHA256((const unsigned char *)from, (size_t)(to - from), digest);
    EVP_EncodeBlock((unsigned char *)out, digest, sizeof digest);
}

static void make_policy(void)
{
    char script[64], style[64];

    digest_of("script", script);
    digest_of("style", style);
    snprintf(policy, sizeof policy,
             "default-src 'none'; script-src 'sha256-%s'; style-src "
             "'sha256-%s'; connect-src 'self'; base-uri 'none'; form-action "
             "'none'; frame-ancestors 'none'",
             script, style);
}

void ferry__page_handle(ferry__exchange *x)
{
    pthread_once(&policy_once, make_policy);
    ferry__str_append(&x->reply, ferry__page_html);
    x->content_type = "text/html; charset=utf-8";
    x->policy = policy;
}

/* Gives each rank of the running round what the rank says of its progress,
 * and the round their sum. */
static void add_progress(json_t *status, json_t *round)
{
    static const char *const keys[] = {"bytes_declared", "bytes_received",
                                       "bytes_loaded"};
    json_int_t sums[3] = {0};
    json_t *replica, *rank;
    size_t i, k;

    json_array_foreach(json_object_get(status, "replicas"), i, replica)
    {
        json_array_foreach(json_object_get(replica, "ranks"), k, rank)
        {
            json_t *counters = json_object_get(rank, "counters");

            for (int n = 0; n < 3; n++)
                sums[n] +=
                    json_integer_value(json_object_get(counters, keys[n]));
        }
    }
    for (int n = 0; n < 3; n++)
        json_object_set_new(round, keys[n], json_integer(sums[n]));
}

static void drop_spans(json_t *status)
{
    json_t *replica, *rank;
    size_t i, k;

    json_array_foreach(json_object_get(status, "replicas"), i, replica)
    {
        json_array_foreach(json_object_get(replica, "ranks"), k, rank)
        {
            json_object_del(rank, "spans");
        }
    }
}

void ferry__page_status(ferry__exchange *x, json_t *status)
{
    ferry__history *h = &x->server->history;
    json_t *round = ferry__history_running(h);
    const char *asked = ferry__query(x, "history");
    const char *spans = ferry__query(x, "spans");
    size_t count = asked == NULL ? SHORT_HISTORY : strtoul(asked, NULL, 10);

    if (json_is_object(round))
        add_progress(status, round);
    if (spans == NULL || strcmp(spans, "1") != 0)
        drop_spans(status);
    json_object_set_new(status, "round", round);
    json_object_set_new(status, "time", json_real(ferry__history_wall()));
    json_object_set_new(status, "history",
                        ferry__history_rounds(h, count, asked != NULL));
}

/* As the text format wants a label's value. */
static void label_text(ferry__str *out, const char *value)
{
    for (; *value != '\0'; value++) {
        if (*value == '\\')
            ferry__str_append(out, "\\\\");
        else if (*value == '"')
            ferry__str_append(out, "\\\"");
        else if (*value == '\n')
            ferry__str_append(out, "\\n");
        else
            ferry__str_append_n(out, value, 1);
    }
}

static void family(ferry__str *out, const char *name, const char *help)
{
    ferry__str_printf(out, "# HELP %s %s\n# TYPE %s gauge\n", name, help, name);
}

void ferry__page_metrics(ferry__server *s, ferry__str *out)
{
    char *version = ferry__server_version(s);

    family(out, "ferry:weight_version_info", "The label of the weights.");
    ferry__str_append(out, "ferry:weight_version_info{version=\"");
    label_text(out, version == NULL ? "" : version);
    ferry__str_append(out, "\"} 1\n");
    ferry__free(version);
    family(out, "ferry:replica_ready", "Whether the replica may serve.");
    for (int32_t i = 0; i < s->options->dp_size; i++) {
        ferry__replica *r = &s->replicas[i];
        bool ready;

        pthread_mutex_lock(&r->lock);
        ready = r->up && (r->serving || r->gates > 0);
        pthread_mutex_unlock(&r->lock);
        ferry__str_printf(out, "ferry:replica_ready{replica=\"%d\"} %d\n", i,
                          ready);
    }
    family(out, "ferry:round_running", "Whether a weight update is open.");
    ferry__str_printf(out, "ferry:round_running %d\n",
                      ferry__history_is_open(&s->history));
}
