/* SPDX-License-Identifier: Apache-2.0 */
/* One generation request, from its prompt to its last token.
 * Each token is stamped with the weight version that made it, so that spans
 * are contiguous, never empty, and cover all tokens.
 * Invariant: after `done` is set nobody but the owner touches it. */
#ifndef FERRY_SERVE_REQUEST_H
#define FERRY_SERVE_REQUEST_H

#include "base/str.h"
#include "model/tokenizer.h"
#include "serve/rank_wire.h"

#include <pthread.h>

typedef struct ferry__version_span {
    char *version;      /* owned */
    int32_t start, end; /* output tokens [start, end) */
} ferry__version_span;

typedef struct ferry__request {
    char id[80];
    /* what was asked */
    int32_t *prompt;
    int32_t n_prompt, max_tokens, n_top;
    ferry__sampling sampling;
    int32_t *stop_ids;
    int32_t n_stop_ids;
    char **stop_texts;
    int32_t n_stop_texts;
    bool ignore_eos;
    const ferry__tokenizer *tokenizer; /* may be NULL */
    /* what came out: `n_out` tokens */
    int32_t *tokens;
    ferry__step_token *picked;
    int32_t n_out, out_capacity;
    ferry__version_span *spans;
    size_t n_spans, spans_capacity;
    ferry__str text;     /* bytes so far, when stop_texts are set */
    int32_t n_computed;  /* tokens in the cache */
    char *cache_version; /* owned; of the weights that began it */
    int64_t cache_since_ns;
    int32_t slot;              /* -1: none */
    bool abort;                /* asked to end */
    const char *finish_reason; /* "stop", "length", "abort", "error" */
    int32_t stop_reason;       /* stop id that ended it, or -1 */
    int32_t stop_text;         /* stop text that ended it, or -1 */
    ferry_status status;       /* of "error" */
    char failure[512];
    /* completion */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
    struct ferry__request *next; /* in a replica's queue */
} ferry__request;

ferry_status ferry__request_create(ferry__request **out);
void ferry__request_destroy(ferry__request **request);
/* Takes one sampled token made by `version`; sets finish_reason when it was
 * the last. */
ferry_status ferry__request_take(ferry__request *r,
                                 const ferry__step_token *token,
                                 const char *version, const int32_t *eos_ids,
                                 int32_t n_eos);
/* The owner may go on; `reason` unless one is set. */
void ferry__request_done(ferry__request *r, const char *reason);
void ferry__request_fail(ferry__request *r, ferry_status status,
                         const char *line);
/* Waits for done at most timeout_ms; false when the bound passed. */
bool ferry__request_wait(ferry__request *r, int64_t timeout_ms);

#endif
