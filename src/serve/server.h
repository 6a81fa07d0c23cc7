/* SPDX-License-Identifier: Apache-2.0 */
/* The API process: its replicas, their gates, and the weight version.
 * Locks, in the order they may be taken: server.control (one weight call at
 * a time) > server.ending > server.calls >
 * replica.lock > replica.step_io > server.lock > history.lock, and below all
 * of them asker.lock.
 * Invariant: while a gate is closed no step runs on that replica. */
#ifndef FERRY_SERVE_SERVER_H
#define FERRY_SERVE_SERVER_H

#include "serve/history.h"
#include "serve/http_guard.h"
#include "serve/metrics.h"
#include "serve/request.h"
#include "serve/spawner.h"

typedef enum ferry__pause {
    FERRY__PAUSE_NONE,
    FERRY__PAUSE_ABORT,
    FERRY__PAUSE_WAIT,
    FERRY__PAUSE_KEEP
} ferry__pause;

struct ferry__server;

/* Asks the ranks of a replica how they are, on a thread of its own, so that
 * who wants to know need not wait for one that does not answer. Its lock is a
 * leaf. */
typedef struct ferry__asker {
    pthread_t thread;
    bool thread_started;
    pthread_mutex_t lock; /* all below */
    pthread_cond_t cond;
    bool stop;
    uint64_t asked; /* questions, by number */
    uint64_t done;  /* up to here no answer comes any more */
    int32_t pids[FERRY__TP_MAX];
    json_t *said[FERRY__TP_MAX];   /* a rank's last words; NULL: none */
    uint64_t heard[FERRY__TP_MAX]; /* which were to this question */
} ferry__asker;

typedef struct ferry__replica {
    struct ferry__server *server;
    int32_t index;
    ferry__rank_ends ranks;
    pthread_t thread;
    bool thread_started;
    ferry__asker asker;

    pthread_mutex_t step_io;   /* one exchange on the step sockets at a time */
    pthread_mutex_t step_turn; /* who holds it is the next to get step_io */

    pthread_mutex_t lock; /* all below */
    pthread_cond_t cond;
    bool up;          /* all ranks loaded and alive */
    bool unsynced;    /* respawned: its version is gone */
    bool serving;     /* its weights may be used */
    char reason[512]; /* why not up, or not serving */
    int32_t gates;    /* closed while > 0 */
    bool stepping;
    int32_t readers; /* of stored bytes; a closing gate waits for them */
    bool stop;
    ferry__request *queue, **queue_tail; /* waiting for a slot */
    int32_t n_queued;
    ferry__request **active; /* max_seqs slots, NULL = free */
    int32_t n_active;
    uint64_t n_restarts;
} ferry__replica;

typedef struct ferry__server {
    const ferry__serve_options *options;
    const ferry__model_config *config;
    ferry__tokenizer *tokenizer; /* NULL: ids only */
    ferry__spawner spawner;
    pthread_mutex_t spawner_lock;
    ferry__replica *replicas; /* dp_size */
    ferry__metrics metrics;
    ferry__history history;
    int32_t port;
    char instance[33]; /* random: which server this is, whatever its name */
    ferry__http_guard guard;
    char *tls_cert, *tls_key; /* PEM texts; NULL: plain HTTP */

    pthread_mutex_t calls; /* the control sockets, for one call's length */
    pthread_mutex_t control;
    pthread_mutex_t ending; /* an abort or a commit is on its way to all ranks:
                               never both, or they would end apart */
    /* under control */
    bool round_open;            /* between start and the round's end */
    bool gates_for_round;       /* closed by an in-place round */
    uint64_t prepared_restarts; /* of all replicas, at prepare */

    pthread_mutex_t lock; /* all below */
    char *version;
    ferry__pause paused;
    const char *running; /* weight call in progress, for 409 and status */
    bool asking;         /* it only asks: others wait for it */
    bool taken_over;     /* the init that runs: another one waits for its end */
    bool prepared;       /* the open round: only commit or abort may come */
    uint64_t content;    /* counts changes of what is stored */
    char *last_failure;  /* owned; of the last failed round */
    uint64_t rounds_finished, rounds_failed;
    double last_stop_ms, last_round_ms;
    int64_t round_started_ns;
    uint64_t next_id;
    bool stopping;
} ferry__server;

/* ---- replica.c: sockets, life and gates ---- */
ferry_status ferry__replica_init(ferry__replica *r, ferry__server *server,
                                 int32_t index);
void ferry__replica_destroy(ferry__replica *r);
/* Spawns the ranks and waits until all have loaded. */
ferry_status ferry__replica_start(ferry__replica *r);
/* Marks it down with the recorded line, fails its requests; the replica's
 * thread starts it again. */
void ferry__replica_lost(ferry__replica *r, const char *line);
/* Ends all requests, queued and running, with this. The lock is held. */
void ferry__replica_fail_requests(ferry__replica *r, ferry_status status,
                                  const char *line);
/* Waits until up, at most timeout_ms: FERRY_ENOTREADY with the reason. */
ferry_status ferry__replica_wait_up(ferry__replica *r, int64_t timeout_ms);
/* Closes the gate and waits for the step in progress. Nests. */
void ferry__replica_gate_close(ferry__replica *r);
void ferry__replica_gate_open(ferry__replica *r);
/* Asks every rank whether it may serve; sets serving and reason. */
void ferry__replica_refresh(ferry__replica *r);
/* The same from what its ranks have said of themselves, tp_size objects,
 * which are taken over; asks them when one is NULL. */
void ferry__replica_take_statuses(ferry__replica *r, json_t **statuses);
/* One exchange with every rank on its step socket; bodies may be NULL, else
 * takes tp_size owned texts. The first failure is returned. */
ferry_status ferry__replica_exchange(ferry__replica *r, int32_t kind,
                                     const void *body, size_t size_bytes,
                                     int64_t timeout_ms, void **bodies,
                                     size_t *sizes);

/* The same with one rank; *out_body is owned (ferry__free). */
ferry_status ferry__replica_ask(ferry__replica *r, int32_t rank, int32_t kind,
                                const void *body, size_t size_bytes,
                                void **out_body, size_t *out_size);

/* Takes step_io in its turn; to be unlocked. */
void ferry__replica_io_lock(ferry__replica *r);
/* A rank's answer on its step socket, under step_io. FERRY_ECONN: it is lost,
 * which the caller tells the replica when step_io is free. */
ferry_status ferry__replica_receive(ferry__replica *r, int32_t rank,
                                    const ferry__waiter *w, void **out_body,
                                    size_t *out_size);

/* ---- replica_status.c: how the ranks are ---- */
ferry_status ferry__asker_init(ferry__asker *a);
ferry_status ferry__asker_start(ferry__replica *r);
void ferry__asker_destroy(ferry__asker *a);
/* A new question to all ranks; returns its number at once. */
uint64_t ferry__replica_status_ask(ferry__replica *r);
/* What they answer until then, an object for each rank: its status, "pid" and
 * "answered". Of one that has not answered that is what it said last, of one
 * that never said anything null. A rank that does not answer for 30 s is
 * lost, whoever still waits. */
json_t *ferry__replica_status_take(ferry__replica *r, uint64_t question,
                                   const ferry__deadline *until);
/* Other ranks are there, which have said nothing yet. Under step_io. */
void ferry__replica_status_fresh(ferry__replica *r);
/* What a rank has said of itself elsewhere. */
void ferry__replica_status_said(ferry__replica *r, int32_t rank,
                                const json_t *status);

/* ---- scheduler.c: generation ---- */
/* The replica's thread: runs steps, restarts the ranks when lost. */
void *ferry__scheduler_run(void *replica);
/* Queues the request on the least loaded replica that serves. */
ferry_status ferry__scheduler_submit(ferry__server *server,
                                     ferry__request *request);
/* Asks requests to end: NULL id = all. Returns how many were found. */
int32_t ferry__scheduler_abort(ferry__server *server, const char *id);
/* Requests queued or running. */
void ferry__scheduler_load(ferry__server *server, int32_t *out_running,
                           int32_t *out_waiting);
/* Drops the caches of running requests: they are computed again. */
void ferry__scheduler_forget(ferry__server *server);

/* ---- control.c: the weight calls, on all ranks of all replicas ---- */
ferry_status ferry__control_init(ferry__server *s, const char *init_info);
ferry_status ferry__control_start(ferry__server *s, bool draft);
ferry_status ferry__control_update(ferry__server *s, const char *update_info);
ferry_status ferry__control_finish(ferry__server *s, const char *version);
ferry_status ferry__control_prepare(ferry__server *s);
ferry_status ferry__control_commit(ferry__server *s, const char *version);
/* Idempotent; also ends an update that is running, and answers when it has
 * let go: FERRY_ETIMEOUT when it does not within 4 s. */
ferry_status ferry__control_abort(ferry__server *s);
/* Ends a round that is open for longer than one may take and in which no
 * call runs: its trainer is gone. To be called now and then. */
void ferry__control_reap(ferry__server *s);
ferry_status ferry__control_shutdown(ferry__server *s);
ferry_status ferry__control_set_version(ferry__server *s, const char *version);
/* {"dp0:pp0:pcp0:tp0:NAME": sha256, …}; owned, ferry__free. */
ferry_status ferry__control_checksums(ferry__server *s, char **out_json);
ferry_status ferry__control_reset(ferry__server *s);
/* {"dp0:tp0": plan, …} of the checkpoint's own names. */
ferry_status ferry__control_plan(ferry__server *s, char **out_json);

/* ---- pause.c ---- */
ferry_status ferry__pause_set(ferry__server *s, ferry__pause mode,
                              bool clear_cache);
void ferry__pause_resume(ferry__server *s);

/* ---- server.c ---- */
/* A copy of the current label; owned, ferry__free; NULL when out of memory. */
char *ferry__server_version(ferry__server *s);

#endif
