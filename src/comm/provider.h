/* SPDX-License-Identifier: Apache-2.0 */
/* The providers of groups by name: `tcp` (in libferry), `ucx` and `nccl`
 * (modules, opened on first use).
 * Invariant: a group is opened by the provider that was asked for or not at
 * all; nothing falls back. */
#ifndef FERRY_COMM_PROVIDER_H
#define FERRY_COMM_PROVIDER_H

#include "comm/comm.h"
#include "comm/tcp_store.h"

#define FERRY__UNIQUE_ID 128

/* How the ranks find each other. Providers other than `nccl` know the first
 * way only. */
typedef enum ferry__meeting {
    FERRY__MEET_FERRY,      /* rendezvous.h, all ranks are Ferry */
    FERRY__MEET_VLLM_STORE, /* the store, by the keys that vLLM's ranks use */
    FERRY__MEET_UNIQUE_ID   /* no store (NULL): an id that all were given */
} ferry__meeting;

/* What the ranks of a group agree on, and how to reach this one. */
typedef struct ferry__group {
    int32_t rank, world_size;
    uint64_t generation; /* >= 1, grows with every group of one store */
    const char *secret;  /* 1 to 64 characters; a peer without it is refused
                            before it sees or feeds a byte */
    /* Address to listen on; "": the one that is advertised if none is given
     * for that either, else every one. */
    const char *bind;
    /* Address by which the others reach this rank; "": this end of the
     * connection to the store. */
    const char *advertise;
    /* Ranks with the same name are one host; "": machine and network
     * namespace (setting `host_name` overrides both). */
    const char *host_name;
    int64_t timeout_ms;     /* of the meeting */
    int64_t no_progress_ms; /* of every later call; 0: none */
    /* Asked while the ranks meet, at least every 100 ms, by the thread that
     * waits; a failure ends the meeting with it. NULL: only timeout_ms
     * bounds. */
    ferry_status (*check)(void *arg, const char *what);
    void *check_arg;
    ferry__meeting meeting;
    const void *unique_id; /* FERRY__MEET_UNIQUE_ID: FERRY__UNIQUE_ID bytes */
} ferry__group;

typedef struct ferry__provider {
    size_t size;
    const char *name;
    /* FERRY_OK, or FERRY_EBACKEND and why not here. Opens no device. */
    ferry_status (*available)(void);
    /* True when this machine has links that only this provider uses well
     * (RDMA): then `auto` takes it. NULL: never. */
    bool (*preferred)(void);
    /* All ranks at once. */
    ferry_status (*open)(ferry__store *store, const ferry__group *group,
                         ferry__comm **out);
    /* Rank 0: an id for FERRY__MEET_UNIQUE_ID, FERRY__UNIQUE_ID bytes. NULL:
     * this provider meets in a store only. */
    ferry_status (*unique_id)(void *out);
    /* Version of the library below, which all ranks must share; "" or NULL:
     * none. */
    const char *(*version)(void);
} ferry__provider;

/* FERRY_EUNKNOWN lists the known; FERRY_EBACKEND why one cannot be opened. */
ferry_status ferry__provider_find(const char *name,
                                  const ferry__provider **out);
/* Opens a group by a provider that was found: all ranks at once. Rules of the
 * setting `fault` for groups hold for it (comm_fault.h). */
ferry_status ferry__group_open(const ferry__provider *provider,
                               ferry__store *store, const ferry__group *group,
                               ferry__comm **out);
/* What `auto` means on this machine: "ucx" where it is preferred, else
 * "tcp". The trainer decides, the others follow or refuse. */
const char *ferry__provider_auto(void);
/* The index-th name; NULL after the last. Opens nothing. */
const char *ferry__provider_name(size_t index);

/* What a group left open, settled: shared by the providers. */
const char *ferry__group_host_name(const ferry__group *group);
ferry_status ferry__group_address(ferry__store *store,
                                  const ferry__group *group, char *out,
                                  size_t size_bytes);

/* A provider's module is ferry_comm_<name>; it exports this. */
typedef const ferry__provider *(*ferry__provider_entry_fn)(void);
#define FERRY__PROVIDER_ENTRY "ferry__provider_entry"

extern const ferry__provider ferry__provider_tcp;

#endif
