/* SPDX-License-Identifier: Apache-2.0 */
/* The rendezvous store: server and client of torch's TCPStore protocol
 * (classic backend), so that either end may be torch's.
 * The store has no authentication, as torch's has none: nothing secret is
 * put into it. Invariant: every wait is bounded by its timeout. */
#ifndef FERRY_COMM_TCP_STORE_H
#define FERRY_COMM_TCP_STORE_H

#include "comm/tcp_store_wire.h"

#define FERRY__STORE_CLIENTS_MAX 1024

typedef struct ferry__store_server ferry__store_server;

/* Serves on a thread of its own until closed. host "" or NULL: every
 * address; port 0 picks one. A port that is taken: FERRY_EEXIST at once,
 * naming host:port. */
ferry_status ferry__store_serve(const char *host, int32_t port,
                                int32_t *out_port, ferry__store_server **out);
/* Ends the thread and drops all clients and keys; NULL is fine. */
void ferry__store_server_close(ferry__store_server **server);

/* One connection, for one thread at a time. After a failure other than an
 * argument's or FERRY_ETIMEOUT of a wait, it answers only failures. */
typedef struct ferry__store ferry__store;

/* Connects (again and again until the deadline, as the master may not
 * listen yet) and greets. The timeout is also that of every later call
 * which takes none. */
ferry_status ferry__store_open(const char *host, int32_t port,
                               int64_t timeout_ms, ferry__store **out);
/* The same; `served`: it is known to listen, so that a refusal is final.
 * `check` is asked while this and every later call waits, at least every
 * 100 ms, and a failure ends the call, and the connection, with it. */
ferry_status ferry__store_open_checked(const char *host, int32_t port,
                                       bool served, int64_t timeout_ms,
                                       ferry_status (*check)(void *arg,
                                                             const char *what),
                                       void *check_arg, ferry__store **out);
void ferry__store_close(ferry__store **store);
/* The address of this end of the connection: what others reach this machine
 * by, as far as the store's network goes. */
ferry_status ferry__store_local_address(const ferry__store *s, char *out,
                                        size_t size_bytes);

/* Counts this client as a worker, as torch's clients do; a torch master
 * waits for as many as its world size. */
ferry_status ferry__store_join(ferry__store *s, int64_t *out_count);
/* The master's side: until `world_size` have joined. */
ferry_status ferry__store_await_joined(ferry__store *s, int32_t world_size,
                                       int64_t timeout_ms);

/* Keys are texts without a prefix; "/" is put before them, as torch does. */
ferry_status ferry__store_set(ferry__store *s, const char *key,
                              const void *value, size_t size_bytes);
/* Waits for the key; the value is owned (ferry__free), NUL terminated. */
ferry_status ferry__store_get(ferry__store *s, const char *key,
                              int64_t timeout_ms, void **out_value,
                              size_t *out_size);
ferry_status ferry__store_add(ferry__store *s, const char *key, int64_t amount,
                              int64_t *out_sum);
/* FERRY_OK: all are there. FERRY_DONE: not all. */
ferry_status ferry__store_check(ferry__store *s, const char *const *keys,
                                size_t n);
/* FERRY_ETIMEOUT names the first key; the client may go on. */
ferry_status ferry__store_wait(ferry__store *s, const char *const *keys,
                               size_t n, int64_t timeout_ms);
ferry_status ferry__store_delete(ferry__store *s, const char *key,
                                 bool *out_was_there);
/* Sets the key if its value is `expected` ("" also: absent). The value
 * afterwards is owned. */
ferry_status ferry__store_compare_set(ferry__store *s, const char *key,
                                      const char *expected, const char *value,
                                      void **out_value, size_t *out_size);
ferry_status ferry__store_append(ferry__store *s, const char *key,
                                 const void *value, size_t size_bytes);
ferry_status ferry__store_num_keys(ferry__store *s, int64_t *out_count);
/* All-or-nothing on absent keys is the caller's: wait first. Values are
 * owned each; out arrays have n items. */
ferry_status ferry__store_multi_get(ferry__store *s, const char *const *keys,
                                    size_t n, void **out_values,
                                    size_t *out_sizes);
ferry_status ferry__store_multi_set(ferry__store *s, const char *const *keys,
                                    const void *const *values,
                                    const size_t *sizes, size_t n);

/* O-14: a barrier of `world_size` clients under <prefix>/<generation>/<name>;
 * the last to leave removes its keys. */
ferry_status ferry__store_barrier(ferry__store *s, const char *prefix,
                                  uint64_t generation, const char *name,
                                  int32_t world_size, int64_t timeout_ms);

#endif
