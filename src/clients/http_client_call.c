/* SPDX-License-Identifier: Apache-2.0 */
/* One request over libcurl, which another thread may cancel.
 * Invariant: a request leaves at most once: a connection that dies under it
 * is an error, since nobody knows how far the server got. */
#include "clients/http_client.h"

#include "base/clock.h"
#include "base/thread.h"

#include <string.h>

#define SLICE_MS 100
/* Servers close idle connections (uvicorn after 5 s); one that was idle for
 * longer than this is not used again, so that a request does not meet the
 * closing half way. */
#define IDLE_REUSE_S 2L
#define KEEP_ALIVE_S 30L

typedef struct transfer {
    ferry__http_reply *reply;
    int attempts;
    char error[CURL_ERROR_SIZE];
} transfer;

ferry_status ferry__http_line_open(ferry__http_line *out_line)
{
    ferry__http_line line = {curl_easy_init(), curl_multi_init()};

    if (!line.easy || !line.multi) {
        ferry__http_line_close(&line);
        return ferry_fail(FERRY_ENOMEM, "out of memory: HTTP handle");
    }
    *out_line = line;
    return FERRY_OK;
}

void ferry__http_line_close(ferry__http_line *line)
{
    curl_easy_cleanup(line->easy);
    curl_multi_cleanup(line->multi);
    memset(line, 0, sizeof(*line));
}

/* The client's own line keeps its connection between calls. Who finds it
 * busy (an abort, a status) opens one of its own and need not wait. */
ferry_status ferry__http_op_begin(ferry__http_client *c, ferry__http_op *op,
                                  const char *name, bool cancelable)
{
    memset(op, 0, sizeof(*op));
    op->name = name;
    op->cancelable = cancelable;
    op->timeout_ms = c->timeout_ms;
    atomic_init(&op->canceled, false);
    pthread_mutex_lock(&c->lock);
    op->borrowed = !c->line_busy;
    if (op->borrowed) {
        c->line_busy = true;
        op->line = c->line;
    }
    pthread_mutex_unlock(&c->lock);
    if (!op->borrowed)
        FERRY_TRY(ferry__http_line_open(&op->line));
    pthread_mutex_lock(&c->lock);
    op->next = c->ops;
    c->ops = op;
    pthread_mutex_unlock(&c->lock);
    return FERRY_OK;
}

/* Once the operation is off the list, neither it nor its caller may look at
 * the client again: a close may be waiting for just that. */
void ferry__http_op_end(ferry__http_client *c, ferry__http_op *op)
{
    ferry__http_op **at = &c->ops;

    pthread_mutex_lock(&c->lock);
    while (*at != op)
        at = &(*at)->next;
    *at = op->next;
    if (op->borrowed)
        c->line_busy = false;
    pthread_cond_broadcast(&c->left);
    pthread_mutex_unlock(&c->lock);
    if (!op->borrowed)
        ferry__http_line_close(&op->line);
}

static void cancel_op(ferry__http_op *op)
{
    atomic_store(&op->canceled, true);
    curl_multi_wakeup(op->line.multi);
}

void ferry__http_cancel(ferry__http_client *c)
{
    pthread_mutex_lock(&c->lock);
    for (ferry__http_op *op = c->ops; op; op = op->next) {
        if (op->cancelable)
            cancel_op(op);
    }
    pthread_mutex_unlock(&c->lock);
}

/* A canceled operation is back within one slice, so this ends. */
void ferry__http_drain(ferry__http_client *c)
{
    pthread_mutex_lock(&c->lock);
    while (c->ops) {
        for (ferry__http_op *op = c->ops; op; op = op->next)
            cancel_op(op);
        ferry__cond_wait_until(&c->left, &c->lock,
                               ferry__now_ns() + INT64_C(1000000) * SLICE_MS);
    }
    pthread_mutex_unlock(&c->lock);
}

static size_t on_body(char *bytes, size_t size, size_t n, void *arg)
{
    ferry__http_reply *reply = arg;

    n *= size;
    if (n > FERRY__HTTP_BODY_MAX - reply->body.length) {
        reply->too_long = true;
        return 0;
    }
    ferry__str_append_n(&reply->body, bytes, n);
    return reply->body.failed ? 0 : n;
}

/* Asked before a request goes out on a connection. curl asks again where it
 * would silently repeat a request whose connection died. */
static int on_request(void *arg, char *remote, char *local, int remote_port,
                      int local_port)
{
    transfer *t = arg;

    (void)remote, (void)local, (void)remote_port, (void)local_port;
    return t->attempts++ == 0 ? CURL_PREREQFUNC_OK : CURL_PREREQFUNC_ABORT;
}

static struct curl_slist *add_header(struct curl_slist *list,
                                     const char *header, bool *failed)
{
    struct curl_slist *longer = curl_slist_append(list, header);

    if (!longer)
        *failed = true;
    return longer ? longer : list;
}

static ferry_status make_headers(const ferry__http_client *c, bool has_body,
                                 struct curl_slist **out_list)
{
    struct curl_slist *list = NULL;
    bool failed = false;

    list = add_header(list, "Accept: application/json", &failed);
    list = add_header(list, "Expect:", &failed);
    if (has_body)
        list = add_header(list, "Content-Type: application/json", &failed);
    else
        list = add_header(list, "Content-Type:", &failed);
    if (c->token) {
        ferry__str s = {0};

        ferry__str_printf(&s, "Authorization: Bearer %s", c->token);
        if (s.failed)
            failed = true;
        else
            list = add_header(list, s.data, &failed);
        ferry__str_free(&s);
    }
    if (failed) {
        curl_slist_free_all(list);
        return ferry_fail(FERRY_ENOMEM, "out of memory: HTTP headers");
    }
    *out_list = list;
    return FERRY_OK;
}

static void set_protocols(CURL *easy)
{
#if LIBCURL_VERSION_NUM >= 0x075500
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
#else
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS,
                     (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
#if LIBCURL_VERSION_NUM >= 0x075700
    /* A name look-up that is given up must not be waited for. */
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
#endif
}

/* An empty proxy means none, whatever the environment says; "*" keeps the
 * environment's list of exceptions out of it as well (O-16). */
static void set_way(const ferry__http_client *c, CURL *easy)
{
    curl_easy_setopt(easy, CURLOPT_PROXY, c->proxy ? c->proxy : "");
    curl_easy_setopt(easy, CURLOPT_NOPROXY, c->proxy ? "" : "*");
    if (c->ca_file)
        curl_easy_setopt(easy, CURLOPT_CAINFO, c->ca_file);
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPIDLE, KEEP_ALIVE_S);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPINTVL, KEEP_ALIVE_S);
    curl_easy_setopt(easy, CURLOPT_MAXAGE_CONN, IDLE_REUSE_S);
    set_protocols(easy);
}

/* uvicorn closes a connection on which its application failed, right after
 * the answer: a request that went out on it would be lost. */
static void set_fresh(ferry__http_client *c, CURL *easy)
{
    if (atomic_exchange(&c->fresh, false))
        curl_easy_setopt(easy, CURLOPT_FRESH_CONNECT, 1L);
}

static void set_bounds(const ferry__http_client *c, const ferry__http_op *op,
                       CURL *easy)
{
    int64_t connect_ms = c->connect_timeout_ms < op->timeout_ms
                             ? c->connect_timeout_ms
                             : op->timeout_ms;

    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)op->timeout_ms);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)connect_ms);
}

static void set_request(CURL *easy, bool get, const char *url, const char *body,
                        size_t body_bytes)
{
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "libferry");
    if (get) {
        curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L);
        return;
    }
    curl_easy_setopt(easy, CURLOPT_POST, 1L);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body ? body : "");
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE,
                     (curl_off_t)(body ? body_bytes : 0));
}

static void set_callbacks(CURL *easy, transfer *t)
{
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t->reply);
    curl_easy_setopt(easy, CURLOPT_PREREQFUNCTION, on_request);
    curl_easy_setopt(easy, CURLOPT_PREREQDATA, t);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, t->error);
}

static CURLcode finished_code(CURLM *multi)
{
    CURLcode code = CURLE_FAILED_INIT;
    CURLMsg *message;
    int left;

    while ((message = curl_multi_info_read(multi, &left))) {
        if (message->msg == CURLMSG_DONE)
            code = message->data.result;
    }
    return code;
}

/* True when the transfer ended, false when it was canceled. */
static bool drive(ferry__http_op *op, CURLcode *out_code)
{
    CURLM *multi = op->line.multi;
    CURLMcode rc = curl_multi_add_handle(multi, op->line.easy);
    bool done = false;

    while (rc == CURLM_OK && !atomic_load(&op->canceled)) {
        int running = 0;

        rc = curl_multi_perform(multi, &running);
        done = running == 0;
        if (done || rc != CURLM_OK)
            break;
        rc = curl_multi_poll(multi, NULL, 0, SLICE_MS, NULL);
    }
    *out_code = done ? finished_code(multi)
                     : (rc != CURLM_OK ? CURLE_OUT_OF_MEMORY : CURLE_OK);
    curl_multi_remove_handle(multi, op->line.easy);
    return done || rc != CURLM_OK;
}

static ferry_status no_connection(const ferry__http_client *c,
                                  const ferry__http_op *op)
{
    const char *to = c->proxy ? c->proxy : c->address.host_port;
    long error = 0;

    curl_easy_getinfo(op->line.easy, CURLINFO_OS_ERRNO, &error);
    return ferry_fail(FERRY_ECONN, "%s: %s: cannot connect to %s%s: %s",
                      c->address.base, op->name, c->proxy ? "proxy " : "", to,
                      error ? strerror((int)error) : "connection failed");
}

static ferry_status timed_out(const ferry__http_client *c,
                              const ferry__http_op *op)
{
    long sent = 0;

    curl_easy_getinfo(op->line.easy, CURLINFO_REQUEST_SIZE, &sent);
    if (sent == 0)
        return ferry_fail(FERRY_ETIMEOUT,
                          "%s: %s: no connection to %s within %lld ms",
                          c->address.base, op->name, c->address.host_port,
                          (long long)(c->connect_timeout_ms < op->timeout_ms
                                          ? c->connect_timeout_ms
                                          : op->timeout_ms));
    return ferry_fail(FERRY_ETIMEOUT, "%s: %s: no answer within %lld ms",
                      c->address.base, op->name, (long long)op->timeout_ms);
}

static ferry_status transfer_failed(const ferry__http_client *c,
                                    const ferry__http_op *op, CURLcode code,
                                    const transfer *t)
{
    const char *base = c->address.base;
    const char *text = t->error[0] ? t->error : curl_easy_strerror(code);

    switch (code) {
    case CURLE_OUT_OF_MEMORY:
        return ferry_fail(FERRY_ENOMEM, "%s: %s: out of memory", base,
                          op->name);
    case CURLE_COULDNT_CONNECT:
        return no_connection(c, op);
    case CURLE_OPERATION_TIMEDOUT:
        return timed_out(c, op);
    case CURLE_WRITE_ERROR:
        if (t->reply->too_long)
            return ferry_fail(FERRY_EPEER,
                              "%s: %s: answer longer than %zu bytes", base,
                              op->name, FERRY__HTTP_BODY_MAX);
        return ferry_fail(FERRY_ENOMEM, "%s: %s: out of memory", base,
                          op->name);
    case CURLE_ABORTED_BY_CALLBACK:
    case CURLE_GOT_NOTHING:
    case CURLE_PARTIAL_FILE:
    case CURLE_RECV_ERROR:
    case CURLE_SEND_ERROR:
        return ferry_fail(FERRY_ECONN,
                          "%s: %s: %s closed the connection before its "
                          "answer was whole%s",
                          base, op->name, c->address.host_port,
                          code == CURLE_GOT_NOTHING &&
                                  ferry__starts_with(base, "http://")
                              ? "; is it an https server?"
                              : "");
    default:
        return ferry_fail(FERRY_ECONN, "%s: %s: %s", base, op->name, text);
    }
}

static ferry_status perform(ferry__http_client *c, ferry__http_op *op,
                            transfer *t)
{
    CURLcode code;

    if (!drive(op, &code))
        return ferry_fail(FERRY_ECANCELED, "%s: %s: canceled", c->address.base,
                          op->name);
    if (code != CURLE_OK)
        return transfer_failed(c, op, code, t);
    curl_easy_getinfo(op->line.easy, CURLINFO_RESPONSE_CODE, &t->reply->code);
    if (t->reply->code >= 500)
        atomic_store(&c->fresh, true);
    return FERRY_OK;
}

ferry_status ferry__http_request(ferry__http_client *c, ferry__http_op *op,
                                 bool get, const char *route, const char *body,
                                 size_t body_bytes, ferry__http_reply *reply)
{
    transfer t = {.reply = reply};
    struct curl_slist *headers = NULL;
    CURL *easy = op->line.easy;
    ferry__str url = {0};
    ferry_status status;

    memset(reply, 0, sizeof(*reply));
    FERRY_TRY(make_headers(c, body != NULL, &headers));
    ferry__str_printf(&url, "%s%s", c->address.base, route);
    if (url.failed) {
        status = ferry_fail(FERRY_ENOMEM, "out of memory: URL");
    } else {
        curl_easy_reset(easy);
        set_way(c, easy);
        set_fresh(c, easy);
        set_bounds(c, op, easy);
        set_request(easy, get, url.data, body, body_bytes);
        set_callbacks(easy, &t);
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
        status = perform(c, op, &t);
        /* Nothing of this call's may be left behind in the handle. */
        curl_easy_reset(easy);
    }
    if (status < 0)
        ferry__str_free(&reply->body);
    ferry__str_free(&url);
    curl_slist_free_all(headers);
    return status;
}
