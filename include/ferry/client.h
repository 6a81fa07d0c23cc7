/* SPDX-License-Identifier: Apache-2.0 */
/* SyncClient: how the inference side is reached.
 * Four calls; everything an engine needs from the inference side goes
 * through them (C1). A dict is one JSON object as UTF-8 text. */
#ifndef FERRY_CLIENT_H
#define FERRY_CLIENT_H

#include <ferry/status.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ferry_worker;

/* What a client implements. Each of the four calls reaches every replica,
 * blocks until all are done, and on failure answers a negative status whose
 * line (ferry_fail) says which replica failed and what it said (C3).
 * Engines call from more than one thread, but never two of the four calls at
 * once. `size` is sizeof(ferry_client_ops) as the implementer compiled it. */
typedef struct ferry_client_ops {
    size_t size;
    const char *kind; /* "http", "local", "fanout", …: for logs */

    ferry_status (*init_weight_transfer_engine)(void *self,
                                                const char *init_info);
    ferry_status (*start_weight_update)(void *self);
    ferry_status (*update_weights)(void *self, const char *update_info);
    /* weight_version: NULL leaves the label as it is. */
    ferry_status (*finish_weight_update)(void *self,
                                         const char *weight_version);

    /* ---- optional: each may be NULL (C7) ---- */

    /* Makes a call in flight on another thread return soon with
     * FERRY_ECANCELED. The next call works again. NULL: calls cannot be
     * canceled; an engine then leaves a stuck call behind (bounded by the
     * client's own timeout) and reports its own error. */
    void (*cancel)(void *self);
    /* Ends a round that will not be finished; idempotent. NULL: the peer
     * learns of it at its own deadline, or when the next round starts. */
    ferry_status (*abort_weight_update)(void *self);
    /* Aims the round at the draft model, in place of start. NULL:
     * FERRY_ENOTSUP for a trainer that asks for it. */
    ferry_status (*start_draft_weight_update)(void *self);
    /* Pause (mode "abort", "wait" or "keep") and resume generation. NULL:
     * the caller pauses by its own means. */
    ferry_status (*pause)(void *self, const char *mode, int clear_cache);
    ferry_status (*resume)(void *self);
    /* Fills `buffer` with the peer's status as JSON (cut at size_bytes, NUL
     * terminated). FERRY_EROUTE: the peer is no Ferry. NULL: the same. */
    ferry_status (*status)(void *self, char *buffer, size_t size_bytes);
    /* Fleet commit: everything of finish but the commit itself, on all
     * peers; then commit, or abort_weight_update. NULL: finish commits. */
    ferry_status (*prepare_weight_update)(void *self);
    ferry_status (*commit_weight_update)(void *self,
                                         const char *weight_version);

    /* Frees the client; not while a call runs. NULL: nothing to free. */
    void (*close)(void *self);

    /* Name (URL) of the server number `index` that this client reaches, NULL
     * after the last; borrowed. With more than one, and prepare, commit and a
     * status that says that all are Ferry, a round is prepared on all before
     * it is committed on any. NULL: one server, of unknown name. */
    const char *(*peer)(void *self, size_t index);
    /* Inference workers behind this client: every rank of every replica.
     * NULL: the caller of a backend that needs it gives world_size. A fan-out
     * whose members all have it raises an integer `rank_offset` in init info
     * for each member by the workers of those before it, so that all of them
     * share one communicator. */
    ferry_status (*world_size)(void *self, int32_t *out_workers);
} ferry_client_ops;

/* A client is a table and the implementer's own pointer. Plain data. */
typedef struct ferry_client {
    const ferry_client_ops *ops;
    void *self;
} ferry_client;

/* Calls close if there is one and clears *client. Accepts NULL. */
void ferry_client_close(ferry_client *client);

/* ---- ready clients ---- */

/* A size larger than known, from a newer program, is accepted and cut, here as
 * in the init infos and the send options. */
typedef struct ferry_http_options {
    size_t size;
    const char *token;          /* bearer token; NULL: setting `token`, else
                                 none. Copied. */
    int64_t timeout_ms;         /* one call; 0 = 300000 */
    int64_t connect_timeout_ms; /* 0 = 10000 */
    const char *proxy;          /* NULL: no proxy, whatever the environment */
    const char *ca_file;        /* PEM; NULL: the system's */
    int pause;                  /* not 0: pause(keep, clear_cache) before
                                 start, resume after finish; stays paused on
                                 failure, and the reason is logged */
} ferry_http_options;
#define FERRY_HTTP_OPTIONS_INIT                                                \
    {                                                                          \
        sizeof(ferry_http_options), 0, 0, 0, 0, 0, 0                           \
    }

/* The RLHF routes of a vLLM server or of `ferry serve` under `base_url`
 * ("http://127.0.0.1:8000", a trailing slash and IPv6 in brackets are fine).
 * Opens no connection yet. FERRY_EINVAL: malformed URL. Calls answer
 * FERRY_EROUTE with a hint when the route is absent, FERRY_EPEER with the
 * server's own text, FERRY_EAUTH, FERRY_ECONN, FERRY_ETIMEOUT. */
ferry_status ferry_client_http(const char *base_url,
                               const ferry_http_options *options,
                               ferry_client *out_client);

/* Sends each call to all of `clients` in parallel and waits for all; the
 * first failure (by index) is reported with its index, the others are
 * logged. Where it only tells of a rank of another client, as a broadcast's
 * peers do of one that died, that client's own failure is reported, with the
 * first one behind it; ranks have the name of their server beside them, once
 * an init info with rank_offset told which they are. During init and update
 * replicas may wait for bytes that a failed one will never let through: 500 ms
 * after the first failure the others are canceled. Optional calls are offered
 * where all clients have them (cancel and abort always, status where any has
 * it). Its status is {"replicas": [one of each client]}; where some are Ferry
 * and some are not, null stands for those that are not, and the lists "ferry"
 * and "not_ferry" name them; FERRY_EROUTE: none is Ferry, FERRY_EINVAL: two of
 * them are one server (both say the same "instance"). Owns the clients on
 * success and clears the caller's copies. */
ferry_status ferry_client_fanout(ferry_client *clients, size_t count,
                                 ferry_client *out_client);

/* A worker in this process (see worker.h). The worker must outlive it. */
ferry_status ferry_client_local(struct ferry_worker *worker,
                                ferry_client *out_client);

#ifdef __cplusplus
}
#endif
#endif
