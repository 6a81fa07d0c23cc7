/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the worker share.
 * Invariant: fields below `guarded` are read and written under round.lock;
 * all others only by the call that is inside the round. */
#ifndef FERRY_CORE_WORKER_STATE_H
#define FERRY_CORE_WORKER_STATE_H

#include "core/loading.h"
#include "core/round.h"
#include <ferry/backend.h>

#define FERRY__UNTOUCHED_MAX 8

/* A model that rounds can aim at: the target itself or its draft. */
typedef struct ferry__target {
    struct ferry_worker *worker;
    const char *label; /* "target", "draft" */
    ferry_model model;
    ferry__plan *plan;
    ferry__loading *loading;
    ferry__staging staging;
    ferry__manifest last;       /* of the last finished round since init */
    ferry__manifest next_last;  /* made at prepare, in force at commit */
    bool has_last, last_kernel; /* in kernel format */
    bool was_dirty;             /* when this round began */
    /* guarded */
    bool dirty;         /* live bytes may be of two versions */
    bool synced;        /* holds a whole checkpoint */
    size_t n_untouched; /* by the last finished round */
    size_t untouched[FERRY__UNTOUCHED_MAX];
} ferry__target;

struct ferry_worker {
    ferry__round round;
    ferry_worker_options options;
    char *backend; /* NULL: no engine, no transfers */
    const ferry_worker_engine_ops *ops;
    void *self;
    void *init_info;
    bool inited;
    bool engine_started; /* in this round */
    bool reload_open;    /* the engine began a layerwise reload */
    bool told_format;    /* is_checkpoint_format was logged */
    ferry__target targets[2];
    size_t n_targets;
    ferry__target *target; /* what self.model is now */
    /* guarded */
    char *version;
    char path[96];
};

static inline bool ferry__worker_is_staged(const ferry_worker *w)
{
    return w->options.commit == FERRY_COMMIT_STAGED;
}

/* The engine's update returns before all was handed over. */
static inline bool ferry__worker_engine_defers(const ferry_worker *w)
{
    return w->ops != NULL &&
           (w->ops->flags & FERRY_WORKER_DEFERS_PROCESSING) != 0;
}

/* The engine works in kernel format, where no update says otherwise. */
static inline bool ferry__worker_engine_is_kernel(const ferry_worker *w)
{
    return (w->ops->flags & FERRY_WORKER_KERNEL_FORMAT) != 0;
}

/* The table that engines are given. */
const ferry_worker_host *ferry__worker_host(void);

/* ---- worker_round.c: calls from inside the round ---- */

/* Leaves the round; an abort that came meanwhile ends it and is the answer.
 */
ferry_status ferry__worker_leave(ferry_worker *w, ferry_status st);
/* Ends the open round as failed, with this thread's last error, which stays
 * the last error. Returns st. */
ferry_status ferry__worker_fail_round(ferry_worker *w, ferry_status st);
/* Ends a round whose deadline passed between calls: its trainer is gone. */
void ferry__worker_reap(ferry_worker *w);
ferry_status ferry__worker_engine_start(ferry_worker *w);
/* Marks the current target as half written. */
void ferry__worker_set_dirty(ferry__target *t, bool dirty);
void ferry__worker_shutdown_engine(ferry_worker *w);
ferry_status ferry__worker_configured(const ferry_worker *w);
/* The storage was filled with a whole checkpoint by other means. */
void ferry__worker_adopt(ferry_worker *w);
/* Prepares; a round in which nothing was declared also ends here, since it
 * has nothing that others would have to agree on. */
ferry_status ferry__worker_prepare_or_end(ferry_worker *w, bool *out_ended);

/* worker_update.c */
ferry_status ferry__worker_receive(ferry_worker *w, const char *update_info);

#endif
