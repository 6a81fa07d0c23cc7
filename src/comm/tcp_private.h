/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the provider `tcp` share.
 * Invariant: `peers`' data sockets belong to the thread in a call; control
 * sockets are written under `lock`, read by the thread in a call. */
#ifndef FERRY_COMM_TCP_PRIVATE_H
#define FERRY_COMM_TCP_PRIVATE_H

#include "comm/tcp.h"
#include "comm/tcp_proof.h"

#include "base/clock.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#define TCP__HEAD_BYTES    24
#define TCP__CONTROL_BYTES 256
#define TCP__TEXT_BYTES    (TCP__CONTROL_BYTES - 12)
/* How often the owner's check is asked, whether bytes move or not. */
#define TCP__CHECK_MS INT64_C(100)

/* The connections that pulls make are proved under a number of their own. */
enum {
    TCP__GROUP,
    TCP__PAIR,
    TCP__CONTROL,
    TCP__CHANNELS,
    TCP__PULLS = TCP__CHANNELS
};
enum { TCP__FAILED = 1, TCP__ABORTED, TCP__LEFT, TCP__WAITS };

typedef struct tcp__peer {
    int fds[TCP__CHANNELS];          /* -1: none */
    char host[FERRY__COMM_TCP_HOST]; /* this rank reaches it by it */
    bool left, gone;
    int32_t waits_for; /* whom it timed out on, + 1 */
    unsigned char control[TCP__CONTROL_BYTES];
    size_t control_bytes;
} tcp__peer;

typedef struct tcp__flow tcp__flow;
typedef struct tcp__call tcp__call;
typedef struct tcp__comm tcp__comm;

/* Who moves the flows of a group instead of its sockets: the provider `ucx`,
 * whose groups are tcp groups in all else. */
typedef struct tcp__bearer {
    ferry_status (*carry)(tcp__comm *c, const tcp__call *call, tcp__flow *flows,
                          size_t n);
    /* After a failure was told to the others: nothing may be read from or
     * written to the caller's memory when it returns. */
    void (*drop)(tcp__comm *c);
} tcp__bearer;

struct tcp__comm {
    ferry__comm base;
    const tcp__bearer *carrier; /* NULL: the sockets */
    void *carrier_state;
    tcp__identity identity;
    int64_t no_progress_ms;
    char where[FERRY__COMM_TCP_HOST + 16]; /* this rank listened there */
    char host[FERRY__COMM_TCP_HOST]; /* the others reach this rank by it */
    char bind[FERRY__COMM_TCP_HOST]; /* "": every address */
    struct tcp__pulls *pulls;        /* NULL until one is needed */
    uint64_t host_ids[FERRY__COMM_TCP_WORLD];
    tcp__peer peers[FERRY__COMM_TCP_WORLD];
    _Atomic uint64_t sent_remote, sent_local; /* a stream's thread adds too */
    /* comm_ops.moved: bytes of calls, the last of which began at
     * `moved_before`, and how often a stream that waits saw any move. */
    _Atomic uint64_t moved, streamed;
    uint64_t moved_before;
    const tcp__flow *flows; /* of the call under way */
    size_t n_flows;
    uint32_t sequence; /* of collectives */
    int wake;          /* event descriptor: aborted by this rank */
    atomic_bool aborted;
    pthread_mutex_t lock;
    ferry_status failed;
    char line[1024];
    /* Of the call under way. */
    struct pollfd polls[3 * FERRY__COMM_TCP_WORLD + 2];
};

struct tcp__call {
    const char *name;
    ferry__deadline deadline;
};

/* One direction of one pair in one call: a head that says what follows, and
 * the bytes. Out of `after`, if set, no more is sent than it has received. */
struct tcp__flow {
    int32_t peer;
    int channel;
    bool out;
    unsigned char head[TCP__HEAD_BYTES], came[TCP__HEAD_BYTES];
    char *bytes;
    size_t size, done;
    size_t head_done;
    const tcp__flow *after;
    /* Of the same peer and direction: moves only once that one is done. */
    const tcp__flow *behind;
};

/* `what` and `detail` must be the same at both ends, as must `size`. */
void ferry__tcp_flow_init(tcp__flow *f, bool out, int32_t peer, int channel,
                          uint32_t what, uint32_t detail, uint32_t sequence,
                          void *bytes, size_t size);
/* Until all flows are done; any failure breaks the group. */
ferry_status ferry__tcp_run(tcp__comm *c, const tcp__call *call,
                            tcp__flow *flows, size_t n);
ferry_status ferry__tcp_enter(tcp__comm *c, const char *name,
                              int64_t timeout_ms, tcp__call *out);
/* Breaks the group and lets its carrier drop what is under way. */
ferry_status ferry__tcp_fail(tcp__comm *c, ferry_status status);
/* Records a failure for good and tells the others. Returns status. */
ferry_status ferry__tcp_break(tcp__comm *c, ferry_status status);
void ferry__tcp_tell(tcp__comm *c, uint32_t kind, ferry_status status,
                     const char *text);
/* Reads what the control connections hold: a failure or an abort that is
 * told of; who left or is gone is noted. */
ferry_status ferry__tcp_listen_all(tcp__comm *c, const char *name);
/* Fills c->polls with what ends a wait; the number of them. */
nfds_t ferry__tcp_control_polls(tcp__comm *c);
/* A failure that another rank tells of is held until nothing moves any more:
 * its cause may lie after this call, whose bytes are all on their way. The
 * next call then fails. */
ferry_status ferry__tcp_hold(tcp__comm *c, ferry_status status);
/* Counts what has moved and, when 100 ms have passed since *asked_ns, asks the
 * owner's check. */
ferry_status ferry__tcp_ask(tcp__comm *c, const char *name, int64_t *asked_ns);
uint64_t ferry__tcp_moved(ferry__comm *comm);
/* comm_ops.watch and why_ended. */
ferry_status ferry__tcp_watch(ferry__comm *comm, int32_t peer, int stop_fd);
ferry_status ferry__tcp_why_ended(ferry__comm *comm, int32_t peer);
/* The head that came is the one that was awaited. */
ferry_status ferry__tcp_check_head(const tcp__flow *f, const tcp__call *call);
const char *ferry__tcp_how(const tcp__flow *f);
void ferry__tcp_count_sent(tcp__comm *c, int32_t peer, size_t n);
/* Of the flows of the call under way, by the thread in it. */
void ferry__tcp_count_moved(tcp__comm *c);
/* The failures of a wait for `peer`; `how`: "took nothing more", … */
ferry_status ferry__tcp_lost(const tcp__comm *c, const tcp__call *call,
                             int32_t peer, int error);
ferry_status ferry__tcp_time_out(tcp__comm *c, const tcp__call *call,
                                 int32_t peer, const char *how,
                                 ferry_status status, int64_t bound_ms);
/* Tells of a wait for `peer` (ferry__comm_waited). */
void ferry__tcp_waited(tcp__comm *c, int32_t peer, int64_t from_ns);
ferry_status ferry__tcp_meet(tcp__comm *c,
                             const ferry__comm_tcp_options *options,
                             int listener, int64_t timeout_ms);

void ferry__tcp_close(ferry__comm *comm);

extern const ferry__comm_ops ferry__tcp_ops;

#endif
