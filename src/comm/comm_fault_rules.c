/* SPDX-License-Identifier: Apache-2.0 */
/* Rules of the setting `fault` for groups, and what they say of a message.
 * Invariant: a rule fires once, but a delay and a cut go on. */
#include "comm/comm_fault_rules.h"

#include "base/clock.h"
#include "base/log.h"
#include "device/memory.h"

#include <signal.h>
#include <string.h>

#define SLICE_MS 50

static const char *const kinds[FERRY__COMM_KINDS] = {
    "delay", "stall", "corrupt", "drop", "short", "cut", "fail", "die", "stop"};

/* ---- reading ---- */

static bool read_rank(const char *text, size_t n, int32_t *out)
{
    uint64_t value;

    if (ferry__fault_is_word(text, n, "*")) {
        *out = FERRY__ANY_RANK;
        return true;
    }
    if (!ferry__fault_number(text, n, &value) || value > INT32_MAX)
        return false;
    *out = (int32_t)value;
    return true;
}

/* "FROM->TO:", and moves past it. */
static bool read_pair(const char **text, const char *end, ferry__comm_rule *r)
{
    const char *from = *text;
    const char *arrow = memchr(from, '-', (size_t)(end - from));
    const char *to, *colon;

    if (!arrow || end - arrow < 2 || arrow[1] != '>')
        return false;
    to = arrow + 2;
    colon = memchr(to, ':', (size_t)(end - to));
    if (!colon || !read_rank(from, (size_t)(arrow - from), &r->from) ||
        !read_rank(to, (size_t)(colon - to), &r->to))
        return false;
    *text = colon + 1;
    return true;
}

static bool read_place(const char *text, const char *end, ferry__comm_rule *r)
{
    if (end - text > 5 && memcmp(text, "sent:", 5) == 0) {
        r->sent = true;
        text += 5;
    }
    return ferry__fault_number(text, (size_t)(end - text), &r->at);
}

/* "KIND", "KIND@PLACE", each with or without "=T". */
static bool read_act(const char *text, const char *end, ferry__comm_rule *r)
{
    const char *equals = memchr(text, '=', (size_t)(end - text));
    const char *place_end = equals ? equals : end;
    const char *at = memchr(text, '@', (size_t)(place_end - text));
    const char *word_end = at ? at : place_end;

    while (
        r->kind < FERRY__COMM_KINDS &&
        !ferry__fault_is_word(text, (size_t)(word_end - text), kinds[r->kind]))
        r->kind++;
    if (r->kind == FERRY__COMM_KINDS)
        return false;
    if (at && !read_place(at + 1, place_end, r))
        return false;
    if (equals &&
        !ferry__fault_time(equals + 1, (size_t)(end - equals) - 1, &r->ms))
        return false;
    /* Only a delay has no place, and only waits have a time. */
    return (at == NULL) == (r->kind == FERRY__COMM_DELAY) &&
           (equals != NULL) ==
               (r->kind == FERRY__COMM_DELAY || r->kind == FERRY__COMM_STALL);
}

static bool read_rule(const char *item, size_t n, ferry__comm_rules *rules)
{
    const char *text = item + strlen("comm:"), *end = item + n;
    ferry__comm_rule r = {.kind = FERRY__COMM_DELAY};

    if (rules->n == FERRY__COMM_RULES_MAX || !read_pair(&text, end, &r) ||
        !read_act(text, end, &r))
        return false;
    rules->rules[rules->n++] = r;
    return true;
}

ferry_status ferry__comm_rules_parse(const char *text, ferry__comm_rules *out)
{
    ferry__comm_rules rules = {0};
    const char *item;
    size_t n;

    while (ferry__fault_item(&text, &item, &n)) {
        uint64_t seed;

        if (n > 5 && memcmp(item, "seed=", 5) == 0 &&
            ferry__fault_number(item + 5, n - 5, &seed))
            rules.seed = seed;
        if (ferry__fault_is_comm(item, n) && !read_rule(item, n, &rules))
            return ferry_fail(FERRY_EINVAL,
                              "setting fault: '%.*s' is no fault of a group; "
                              "see docs/faults.md",
                              n < 80 ? (int)n : 80, item);
    }
    *out = rules;
    return FERRY_OK;
}

/* Where the file changed, the rules begin afresh. */
static ferry_status read_anew(ferry__faulty *f)
{
    char text[FERRY__FAULT_TEXT_BYTES] = "";
    ferry_status status = FERRY_OK;

    if (!f->from_file)
        return FERRY_OK;
    FERRY_TRY(ferry__fault_text(text));
    pthread_mutex_lock(&f->lock);
    if (strcmp(text, f->text) != 0)
        status = ferry__comm_rules_parse(text, &f->plan);
    if (status == FERRY_OK)
        memcpy(f->text, text, sizeof(text));
    pthread_mutex_unlock(&f->lock);
    return status;
}

/* ---- one message ---- */

static bool is_rank(int32_t pattern, int32_t rank)
{
    return pattern == FERRY__ANY_RANK || rank == FERRY__ANY_RANK ||
           pattern == rank;
}

/* Whether the message goes over the rule's pair, seen from this end. */
static bool concerns(const ferry__faulty *f, const ferry__comm_rule *r,
                     const ferry__message *m)
{
    int32_t me = f->base.rank;

    return r->sent == m->sent && is_rank(r->from, m->sent ? me : m->peer) &&
           is_rank(r->to, m->sent ? m->peer : me);
}

/* A cut severs both directions, wherever it fired. */
static bool is_cut(const ferry__faulty *f, const ferry__comm_rule *r,
                   const ferry__message *m)
{
    int32_t me = f->base.rank;

    if (r->kind != FERRY__COMM_CUT || !r->fired)
        return false;
    return (is_rank(r->from, me) && is_rank(r->to, m->peer)) ||
           (is_rank(r->to, me) && is_rank(r->from, m->peer));
}

/* Rules that wait, stop or fail, copied out of the lock. */
typedef struct acts {
    int64_t wait_ms;
    bool die, stop, fail;
} acts;

static void note_hit(ferry__comm_rule *r, const ferry__message *m,
                     uint64_t offset, acts *a, ferry__verdict *v)
{
    r->fired = true;
    switch (r->kind) {
    case FERRY__COMM_STALL:
        a->wait_ms += r->ms;
        break;
    case FERRY__COMM_DIE:
        a->die = true;
        break;
    case FERRY__COMM_STOP:
        a->stop = true;
        break;
    case FERRY__COMM_FAIL:
        a->fail = true;
        break;
    case FERRY__COMM_CORRUPT:
        v->corrupt = m->size_bytes > 0;
        v->corrupt_at = offset;
        v->place = r->at;
        break;
    case FERRY__COMM_SHORT:
        v->keep = offset < v->keep ? offset : v->keep;
        break;
    default:
        v->lost = true;
    }
}

/* A message without bytes (a barrier) is struck at the place where it is. */
static void weigh(ferry__faulty *f, const ferry__message *m, acts *a,
                  ferry__verdict *v)
{
    uint64_t span = m->size_bytes > 0 ? m->size_bytes : 1;

    for (size_t i = 0; i < f->plan.n; i++) {
        ferry__comm_rule *r = &f->plan.rules[i];
        uint64_t first = r->seen;

        if (is_cut(f, r, m))
            v->lost = true;
        if (!concerns(f, r, m))
            continue;
        r->seen += m->size_bytes;
        if (r->kind == FERRY__COMM_DELAY)
            a->wait_ms += r->ms;
        else if (!r->fired && r->at >= first && r->at - first < span)
            note_hit(r, m, r->at - first, a, v);
    }
}

static ferry_status look(const ferry__faulty *f, const char *what)
{
    const ferry__comm *c = &f->base;

    if (atomic_load(&f->aborted))
        return ferry_fail(FERRY_ECANCELED, "%s: the group was aborted", what);
    return c->check ? c->check(c->check_arg, what) : FERRY_OK;
}

static ferry_status wait_ms(const ferry__faulty *f, int64_t ms,
                            const char *what)
{
    const ferry__deadline end = ferry__deadline_in(ms);
    int64_t left;

    while ((left = ferry__deadline_left_ms(&end)) > 0) {
        ferry__sleep_ms(left < SLICE_MS ? left : SLICE_MS);
        FERRY_TRY(look(f, what));
    }
    return FERRY_OK;
}

static ferry_status act(ferry__faulty *f, const ferry__message *m,
                        const acts *a)
{
    const char *verb = m->sent ? "sends" : "receives";
    int me = (int)f->base.rank;

    if (a->wait_ms > 0)
        FERRY_TRY(wait_ms(f, a->wait_ms, m->what));
    if (a->stop) {
        ferry__log(FERRY_LOG_INFO, "fault: rank %d stops while it %s in %s", me,
                   verb, m->what);
        raise(SIGSTOP);
    }
    if (a->die) {
        ferry__log(FERRY_LOG_INFO, "fault: rank %d dies while it %s in %s", me,
                   verb, m->what);
        raise(SIGKILL);
    }
    if (!a->fail)
        return FERRY_OK;
    atomic_store(&f->aborted, true);
    return ferry_fail(FERRY_EIO, "fault: rank %d fails while it %s in %s", me,
                      verb, m->what);
}

ferry_status ferry__faulty_judge(ferry__faulty *f, const ferry__message *m,
                                 ferry__verdict *out)
{
    ferry__verdict v = {.keep = m->size_bytes};
    acts a = {0};

    if (atomic_load(&f->aborted))
        return ferry_fail(FERRY_ECANCELED,
                          "%s: the group was aborted, or "
                          "an earlier call on it failed",
                          m->what);
    FERRY_TRY(read_anew(f));
    pthread_mutex_lock(&f->lock);
    v.seed = f->plan.seed;
    weigh(f, m, &a, &v);
    pthread_mutex_unlock(&f->lock);
    FERRY_TRY(act(f, m, &a));
    if (v.corrupt && v.corrupt_at >= v.keep)
        v.corrupt = false;
    *out = v;
    return FERRY_OK;
}

/* Memory of a device is reached by copies of one byte. */
ferry_status ferry__faulty_flip(ferry__faulty *f, const ferry__verdict *v,
                                void *bytes)
{
    const ferry__memory *memory = f->base.memory;
    unsigned char *at = (unsigned char *)bytes + v->corrupt_at, byte = 0;
    ferry__queue *queue = NULL;
    ferry_status status;

    if (!memory || memory->device == 0) {
        ferry__fault_flip(v->seed, v->place, at);
        return FERRY_OK;
    }
    FERRY_TRY(memory->queue_create(&queue));
    status = memory->copy(queue, &byte, at, 1);
    ferry__fault_flip(v->seed, v->place, &byte);
    if (status == FERRY_OK)
        status = memory->copy(queue, at, &byte, 1);
    memory->queue_destroy(queue);
    return status;
}

ferry_status ferry__faulty_starve(ferry__faulty *f, const ferry__message *m)
{
    ferry_status status = wait_ms(f, m->timeout_ms, m->what);

    atomic_store(&f->aborted, true);
    FERRY_TRY(status);
    if (m->peer == FERRY__ANY_RANK)
        return ferry_fail(FERRY_ETIMEOUT, "%s: no rank answered within %lld ms",
                          m->what, (long long)m->timeout_ms);
    return ferry_fail(FERRY_ETIMEOUT, "%s: rank %d: nothing within %lld ms",
                      m->what, (int)m->peer, (long long)m->timeout_ms);
}
