/* SPDX-License-Identifier: Apache-2.0 */
/* The provider `nccl` over NCCL itself, as far as one device shows it (NCCL
 * refuses two ranks on one): a group of one rank in each of the ways to meet,
 * what it carries, and that neither an abort nor a missing peer hangs. */
#include "comm/provider.h"
#include "device/memory.h"

#include "gpu_check.h"

#include <pthread.h>
#include <string.h>

#define T 60000 /* the first use of a device takes seconds */

static const ferry__provider *nccl;

static ferry__group group_of(int32_t world_size, ferry__meeting meeting)
{
    return (ferry__group){.rank = 0,
                          .world_size = world_size,
                          .generation = 1,
                          .secret = "s",
                          .bind = "127.0.0.1",
                          .advertise = "127.0.0.1",
                          .host_name = "",
                          .timeout_ms = T,
                          .meeting = meeting};
}

static ferry__comm *open_alone(ferry__meeting meeting)
{
    ferry__group group = group_of(1, meeting);
    unsigned char id[FERRY__UNIQUE_ID];
    ferry__store_server *server = NULL;
    ferry__store *store = NULL;
    ferry__comm *c = NULL;
    int32_t port;

    if (meeting == FERRY__MEET_UNIQUE_ID) {
        GOOD(nccl->unique_id(id));
        group.unique_id = id;
    } else {
        GOOD(ferry__store_serve("127.0.0.1", 0, &port, &server));
        GOOD(ferry__store_open("127.0.0.1", port, T, &store));
    }
    GOOD(nccl->open(store, &group, &c));
    ferry__store_close(&store);
    ferry__store_server_close(&server);
    return c;
}

static void carry(ferry__comm *c)
{
    const ferry__memory *m = c->memory;
    unsigned char host[1000], back[1000] = {0}, all[1000];
    float x[3] = {1, 2, 3};
    ferry__queue *q;
    ferry__event *e;
    void *memory;

    CHECK(m && strcmp(m->name, "cuda") == 0);
    for (size_t i = 0; i < sizeof(host); i++)
        host[i] = (unsigned char)(i * 3);
    GOOD(m->alloc((size_t)256 << 20, &memory));
    GOOD(m->queue_create(&q));
    GOOD(m->event_create(&e));
    GOOD(m->copy(q, memory, host, sizeof(host)));
    GOOD(m->event_record(e, q));
    while (m->event_query(e) == FERRY_EBUSY)
        ;
    /* Device memory, in place; then host memory through staging. */
    GOOD(c->ops->broadcast(c, memory, (size_t)256 << 20, 0, T));
    GOOD(m->copy(q, back, memory, sizeof(back)));
    GOOD(m->event_record(e, q));
    while (m->event_query(e) == FERRY_EBUSY)
        ;
    CHECK(memcmp(host, back, sizeof(host)) == 0);
    GOOD(c->ops->broadcast(c, back, sizeof(back), 0, T));
    CHECK(memcmp(host, back, sizeof(host)) == 0);
    GOOD(c->ops->all_reduce(c, x, 3, FERRY_DTYPE_F32, FERRY__REDUCE_SUM, T));
    CHECK(x[0] == 1 && x[1] == 2 && x[2] == 3);
    GOOD(c->ops->all_gather(c, host, sizeof(host), all, T));
    CHECK(memcmp(host, all, sizeof(host)) == 0);
    GOOD(c->ops->all_gather(c, host, sizeof(host), NULL, T));
    GOOD(c->ops->barrier(c, T));
    m->event_destroy(e);
    m->queue_destroy(q);
    m->free(memory);
}

static void one_rank_by_unique_id(void)
{
    ferry__comm *c = open_alone(FERRY__MEET_UNIQUE_ID);
    char text[256];

    c->ops->describe(c, text, sizeof(text));
    printf("    %s\n", text);
    carry(c);
    ferry__comm_close(&c);
}

static void one_rank_by_store(void)
{
    ferry__comm *c = open_alone(FERRY__MEET_FERRY);

    carry(c);
    ferry__comm_close(&c);
    c = open_alone(FERRY__MEET_VLLM_STORE);
    carry(c);
    ferry__comm_close(&c);
}

static void *abort_now(void *arg)
{
    ferry__comm *c = arg;

    c->ops->abort(c);
    return NULL;
}

static void abort_ends_the_group_and_a_new_one_opens(void)
{
    for (int i = 0; i < 3; i++) {
        ferry__comm *c = open_alone(FERRY__MEET_UNIQUE_ID);
        pthread_t thread;

        CHECK(pthread_create(&thread, NULL, abort_now, c) == 0);
        pthread_join(thread, NULL);
        CHECK(c->ops->barrier(c, T) == FERRY_ECANCELED);
        CHECK(strstr(ferry_last_error(), "aborted by rank 0"));
        ferry__comm_close(&c);
    }
    one_rank_by_unique_id();
}

static ferry_status refuse(void *arg, const char *what)
{
    (void)arg;
    return ferry_fail(FERRY_EPEER, "%s: the control call failed", what);
}

/* NCCL waits for the other rank; neither bound nor check waits with it. */
static void a_peer_that_never_comes_is_bounded(void)
{
    ferry__group group = group_of(2, FERRY__MEET_UNIQUE_ID);
    unsigned char id[FERRY__UNIQUE_ID];
    int64_t began = ferry__now_ns();
    ferry__comm *c = NULL;

    GOOD(nccl->unique_id(id));
    group.unique_id = id;
    group.timeout_ms = 1000;
    CHECK(nccl->open(NULL, &group, &c) == FERRY_ETIMEOUT);
    CHECK(strstr(ferry_last_error(), "waited for rank 1"));
    GOOD(nccl->unique_id(id));
    group.timeout_ms = T;
    group.check = refuse;
    CHECK(nccl->open(NULL, &group, &c) == FERRY_EPEER);
    CHECK(ferry__now_ns() - began < INT64_C(10000000000));
    CHECK(c == NULL);
}

int main(void)
{
    NEED(ferry__provider_find("nccl", &nccl));
    NEED(nccl->available());
    printf("NCCL %s\n", nccl->version());
    RUN(one_rank_by_unique_id);
    RUN(one_rank_by_store);
    RUN(abort_ends_the_group_and_a_new_one_opens);
    /* Last: it leaves threads in NCCL. */
    RUN(a_peer_that_never_comes_is_bounded);
    fflush(stdout);
    _Exit(0);
}
