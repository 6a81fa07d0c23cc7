/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of generation g: ferry/g/rank/<r>/claims counts who claims the rank,
 * ferry/g/rank/<r>/card holds its card with the proof, ferry/g/arrived counts
 * the ranks, and ferry/g/verdict, which is written once, says "ok" or what is
 * wrong.
 * Invariant: all ranks read one verdict, so all succeed or all fail by it. */
#include "comm/rendezvous.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "comm/rendezvous_card.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CURRENT    "ferry/current"
#define KEY_BYTES  96
#define CARD_BYTES ((size_t)4096)
#define POLL_MS    20
#define MISSING    8 /* named at most */

typedef char key[KEY_BYTES];

ferry_status ferry__rendezvous_rank(int32_t dp_index, int32_t ranks_per_dp,
                                    int32_t rank_in_dp, int32_t offset,
                                    int32_t world_size, int32_t *out_rank)
{
    int64_t rank;

    if (dp_index < 0 || ranks_per_dp < 1 || offset < 0 || rank_in_dp < 0 ||
        rank_in_dp >= ranks_per_dp)
        return ferry_fail(FERRY_EINVAL,
                          "rank %d of %d in data-parallel group %d, offset %d",
                          rank_in_dp, ranks_per_dp, dp_index, offset);
    rank = (int64_t)dp_index * ranks_per_dp + rank_in_dp + offset;
    if (rank >= world_size)
        return ferry_fail(FERRY_EINVAL,
                          "data-parallel group %d × %d ranks + rank %d + "
                          "offset %d = rank %lld, the world has %d",
                          dp_index, ranks_per_dp, rank_in_dp, offset,
                          (long long)rank, world_size);
    *out_rank = (int32_t)rank;
    return FERRY_OK;
}

static void key_of(key out, uint64_t generation, const char *name)
{
    snprintf(out, KEY_BYTES, "ferry/%" PRIu64 "/%s", generation, name);
}

static void rank_key(key out, uint64_t generation, int32_t rank,
                     const char *name)
{
    snprintf(out, KEY_BYTES, "ferry/%" PRIu64 "/rank/%d/%s", generation, rank,
             name);
}

/* ---- generations ---- */

static ferry_status forget(ferry__store *s, uint64_t generation,
                           int32_t world_size)
{
    static const char *const names[] = {"arrived", "verdict"};
    key k;

    for (int32_t r = 0; r < world_size; r++) {
        rank_key(k, generation, r, "claims");
        FERRY_TRY(ferry__store_delete(s, k, NULL));
        rank_key(k, generation, r, "card");
        FERRY_TRY(ferry__store_delete(s, k, NULL));
    }
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        key_of(k, generation, names[i]);
        FERRY_TRY(ferry__store_delete(s, k, NULL));
    }
    return FERRY_OK;
}

/* The generation that is alive and its world size; 0 before the first. */
static ferry_status read_current(ferry__store *s, uint64_t *out_generation,
                                 int32_t *out_world)
{
    const char *current = CURRENT;
    ferry_status status = ferry__store_check(s, &current, 1);
    size_t size;
    void *value;
    int fields;

    FERRY_TRY(status);
    *out_generation = 0;
    *out_world = 0;
    if (status == FERRY_DONE)
        return FERRY_OK;
    FERRY_TRY(ferry__store_get(s, CURRENT, 1000, &value, &size));
    fields = sscanf(value, "%" SCNu64 " %" SCNd32, out_generation, out_world);
    ferry__free(value);
    if (fields != 2 || *out_world < 0 || *out_world > FERRY__COMM_TCP_WORLD)
        return ferry_fail(FERRY_EPEER,
                          "rendezvous: key " CURRENT " is not ours");
    return FERRY_OK;
}

static ferry_status is_over(uint64_t mine, uint64_t alive)
{
    return ferry_fail(FERRY_EORDER,
                      "rendezvous: generation %" PRIu64 " is over, the store "
                      "is at %" PRIu64,
                      mine, alive);
}

/* Rank 0: clears what the last generation left, without asking its ranks. */
static ferry_status begin(ferry__store *s, const ferry__rendezvous *r)
{
    uint64_t alive;
    int32_t world, n;
    char text[64];

    FERRY_TRY(read_current(s, &alive, &world));
    if (alive > r->generation)
        return is_over(r->generation, alive);
    if (alive > 0 && alive < r->generation)
        FERRY_TRY(forget(s, alive, world));
    n = snprintf(text, sizeof(text), "%" PRIu64 " %d", r->generation,
                 r->world_size);
    return ferry__store_set(s, CURRENT, text, (size_t)n);
}

/* The others: until rank 0 has begun this generation. */
static ferry_status await_begin(ferry__store *s, const ferry__rendezvous *r,
                                const ferry__deadline *until)
{
    for (;;) {
        uint64_t alive;
        int32_t world;

        FERRY_TRY(read_current(s, &alive, &world));
        if (alive > r->generation)
            return is_over(r->generation, alive);
        if (alive == r->generation && world != r->world_size)
            return ferry_fail(FERRY_EMISMATCH,
                              "rendezvous: rank 0 has a world of %d, rank %d "
                              "one of %d",
                              world, r->rank, r->world_size);
        if (alive == r->generation)
            return FERRY_OK;
        if (r->check)
            FERRY_TRY(r->check(r->check_arg, "waiting for rank 0"));
        if (ferry__deadline_passed(until))
            return ferry_fail(FERRY_ETIMEOUT,
                              "rendezvous: rank 0 did not begin generation "
                              "%" PRIu64 " within %lld ms",
                              r->generation, (long long)until->bound_ms);
        ferry__sleep_ms(POLL_MS);
    }
}

/* ---- the verdict ---- */

/* Gives a verdict unless there is one, and obeys the one there is. */
static ferry_status judge(ferry__store *s, const ferry__rendezvous *r,
                          const char *verdict)
{
    ferry_status status = FERRY_OK;
    size_t size;
    void *value;
    key k;
    int code;

    key_of(k, r->generation, "verdict");
    FERRY_TRY(ferry__store_compare_set(s, k, "", verdict, &value, &size));
    if (strcmp(value, "ok") != 0) {
        const char *text = strchr(value, ' ');

        code = (int)strtol(value, NULL, 10);
        status = ferry_fail(code < 0 ? (ferry_status)code : FERRY_EPEER,
                            "rendezvous: %s", text ? text + 1 : "?");
    }
    ferry__free(value);
    return status;
}

static ferry_status claimed_twice(ferry__store *s, const ferry__rendezvous *r,
                                  const char *who)
{
    char verdict[512], first[160] = "another";
    size_t size;
    void *value;
    key k;

    /* The first one's card names it; it comes just after its claim. */
    rank_key(k, r->generation, r->rank, "card");
    if (ferry__store_get(s, k, 1000, &value, &size) >= 0) {
        ferry__card_peek(value, size, first, sizeof(first));
        ferry__free(value);
    }
    snprintf(verdict, sizeof(verdict),
             "%d rank %d claimed twice: by %.150s, and by %.150s", FERRY_EEXIST,
             r->rank, first, who);
    FERRY_TRY(judge(s, r, verdict));
    /* The group was complete before: only this one is too many. */
    return ferry_fail(FERRY_EEXIST, "rendezvous: %s", strchr(verdict, ' ') + 1);
}

static ferry_status some_missing(ferry__store *s, const ferry__rendezvous *r)
{
    ferry__str names = {0};
    char verdict[512];
    int missing = 0;

    for (int32_t q = 0; q < r->world_size; q++) {
        const char *name;
        key k;

        rank_key(k, r->generation, q, "card");
        name = k;
        if (ferry__store_check(s, &name, 1) != FERRY_DONE)
            continue;
        if (missing++ < MISSING)
            ferry__str_printf(&names, "%s%d", missing > 1 ? ", " : "", q);
    }
    snprintf(verdict, sizeof(verdict),
             "%d rank %.200s did not come within %lld ms (%d of %d missing)",
             FERRY_ETIMEOUT, names.data ? names.data : "?",
             (long long)r->timeout_ms, missing, r->world_size);
    ferry__str_free(&names);
    return judge(s, r, missing > 0 ? verdict : "ok");
}

/* ---- meeting ---- */

static ferry_status put_down(ferry__store *s, const ferry__rendezvous *r,
                             const void *card, size_t card_bytes)
{
    ferry__str sealed = {0};
    ferry_status status = ferry__card_seal(r, card, card_bytes, &sealed);
    key k;

    rank_key(k, r->generation, r->rank, "card");
    if (status >= 0)
        status = ferry__store_set(s, k, sealed.data, sealed.length);
    ferry__str_free(&sealed);
    return status;
}

static ferry_status arrive(ferry__store *s, const ferry__rendezvous *r,
                           const void *card, size_t card_bytes)
{
    char who[64];
    int64_t n;
    key k;

    rank_key(k, r->generation, r->rank, "claims");
    FERRY_TRY(ferry__store_add(s, k, 1, &n));
    if (n > 1) {
        snprintf(who, sizeof(who), "pid %d", (int)getpid());
        return claimed_twice(s, r, card_bytes > 0 ? card : who);
    }
    FERRY_TRY(put_down(s, r, card, card_bytes));
    key_of(k, r->generation, "arrived");
    FERRY_TRY(ferry__store_add(s, k, 1, &n));
    return n == r->world_size ? judge(s, r, "ok") : FERRY_OK;
}

static ferry_status await_verdict(ferry__store *s, const ferry__rendezvous *r,
                                  const ferry__deadline *until)
{
    int64_t left = ferry__deadline_left_ms(until);
    const char *verdict;
    ferry_status status;
    key k;

    key_of(k, r->generation, "verdict");
    verdict = k;
    status = ferry__store_wait(s, &verdict, 1, left > 0 ? left : 1);
    if (status == FERRY_ETIMEOUT)
        return some_missing(s, r);
    FERRY_TRY(status);
    return judge(s, r, "ok");
}

static ferry_status take_cards(ferry__store *s, const ferry__rendezvous *r,
                               void ***out_cards, size_t **out_sizes)
{
    size_t n = (size_t)r->world_size;
    void **cards = ferry__alloc_array(n, sizeof(*cards));
    size_t *sizes = ferry__alloc_array(n, sizeof(*sizes));
    const char **names = ferry__alloc_array(n, sizeof(*names));
    key *keys = ferry__alloc_array(n, sizeof(*keys));
    ferry_status status = FERRY_ENOMEM;

    if (cards && sizes && names && keys) {
        for (size_t i = 0; i < n; i++) {
            rank_key(keys[i], r->generation, (int32_t)i, "card");
            names[i] = keys[i];
        }
        status = ferry__store_multi_get(s, names, n, cards, sizes);
    }
    ferry__free(names);
    ferry__free(keys);
    if (status < 0) {
        ferry__free(cards);
        ferry__free(sizes);
        return status;
    }
    for (int32_t q = 0; q < r->world_size && status >= 0; q++)
        status = ferry__card_open(r, q, cards[q], &sizes[q]);
    if (status < 0) {
        ferry__rendezvous_free(cards, sizes, r->world_size);
        return status;
    }
    *out_cards = cards;
    *out_sizes = sizes;
    return FERRY_OK;
}

ferry_status ferry__rendezvous_meet(ferry__store *store,
                                    const ferry__rendezvous *r,
                                    const void *card, size_t card_bytes,
                                    void ***out_cards, size_t **out_sizes)
{
    ferry__deadline until = ferry__deadline_in(r->timeout_ms);

    if (r->world_size < 1 || r->world_size > FERRY__COMM_TCP_WORLD ||
        r->rank < 0 || r->rank >= r->world_size || r->generation == 0 ||
        r->timeout_ms <= 0 || card_bytes > CARD_BYTES || !r->secret)
        return ferry_fail(FERRY_EINVAL,
                          "rendezvous: rank %d of %d, generation %" PRIu64
                          ", timeout %lld ms, card of %zu bytes%s",
                          r->rank, r->world_size, r->generation,
                          (long long)r->timeout_ms, card_bytes,
                          r->secret ? "" : ", no secret");
    FERRY_TRY(r->rank == 0 ? begin(store, r) : await_begin(store, r, &until));
    FERRY_TRY(arrive(store, r, card, card_bytes));
    FERRY_TRY(await_verdict(store, r, &until));
    return take_cards(store, r, out_cards, out_sizes);
}

void ferry__rendezvous_free(void **cards, size_t *sizes, int32_t world_size)
{
    for (int32_t r = 0; cards && r < world_size; r++)
        ferry__free(cards[r]);
    ferry__free(cards);
    ferry__free(sizes);
}
