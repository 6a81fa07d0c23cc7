/* SPDX-License-Identifier: Apache-2.0 */
/* The setting `fault` as rules, and the rules that need no bytes.
 * Invariant: nothing here is random; the seed and the place decide. */
#include "backends/fault/fault_wire.h"

#include "base/clock.h"
#include "base/fault_text.h"

#include <signal.h>
#include <string.h>

#define SLICE_MS 50

static const char *const kinds[FAULT__KINDS] = {
    "delay", "stall", "corrupt", "drop",   "short",  "fail",
    "die",   "stop",  "tear",    "garble", "digest", "mute"};

/* N, "?", "sent:N", or a phase. */
static bool read_place(const char *text, size_t n, fault__rule *r)
{
    if (ferry__fault_is_word(text, n, "?")) {
        r->anywhere = true;
        return true;
    }
    r->where = ferry__fault_is_word(text, n, "init")     ? FAULT__INIT
               : ferry__fault_is_word(text, n, "start")  ? FAULT__START
               : ferry__fault_is_word(text, n, "finish") ? FAULT__FINISH
                                                         : FAULT__BYTE;
    if (r->where != FAULT__BYTE)
        return true;
    if (n > 5 && memcmp(text, "sent:", 5) == 0) {
        r->where = FAULT__SENT;
        text += 5;
        n -= 5;
    }
    return ferry__fault_number(text, n, &r->at);
}

static bool read_rule(const char *text, size_t n, fault__plan *plan)
{
    const char *at = memchr(text, '@', n), *equals = memchr(text, '=', n);
    const char *end = text + n;
    const char *word_end = at != NULL ? at : equals != NULL ? equals : end;
    const char *place_end = equals != NULL ? equals : end;
    fault__rule r = {.where = FAULT__BYTE};

    while (
        r.kind < FAULT__KINDS &&
        !ferry__fault_is_word(text, (size_t)(word_end - text), kinds[r.kind]))
        r.kind++;
    if (r.kind == FAULT__KINDS || plan->n == FAULT__RULES_MAX)
        return false;
    if (at != NULL && (place_end < at ||
                       !read_place(at + 1, (size_t)(place_end - at) - 1, &r)))
        return false;
    if (equals != NULL &&
        !ferry__fault_time(equals + 1, (size_t)(end - equals) - 1, &r.ms))
        return false;
    /* Only a delay has no place, and only waits have a time. */
    if ((at == NULL) != (r.kind == FAULT__DELAY) ||
        (equals == NULL) != (r.kind != FAULT__DELAY && r.kind != FAULT__STALL &&
                             r.kind != FAULT__TEAR))
        return false;
    plan->rules[plan->n++] = r;
    return true;
}

static bool read_selector(const char *text, size_t n, fault__plan *plan)
{
    static const struct {
        const char *word;
        size_t offset;
    } words[] = {{"seed=", offsetof(fault__plan, seed)},
                 {"rank=", offsetof(fault__plan, rank)},
                 {"replica=", offsetof(fault__plan, replica)},
                 {"round=", offsetof(fault__plan, round)}};

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        size_t head = strlen(words[i].word);
        uint64_t value;

        if (n <= head || memcmp(text, words[i].word, head) != 0)
            continue;
        if (!ferry__fault_number(text + head, n - head, &value))
            return false;
        memcpy((char *)plan + words[i].offset, &value, sizeof(value));
        return true;
    }
    return false;
}

ferry_status fault__plan_parse(const char *text, fault__plan *out)
{
    fault__plan plan = {.rank = -1, .replica = -1};
    const char *item;
    size_t n;

    while (ferry__fault_item(&text, &item, &n)) {
        if (!ferry__fault_is_comm(item, n) && !read_selector(item, n, &plan) &&
            !read_rule(item, n, &plan))
            return ferry_fail(FERRY_EINVAL,
                              "setting fault: '%.*s' is no fault; see the "
                              "wrapper's README",
                              n < 80 ? (int)n : 80, item);
    }
    *out = plan;
    return FERRY_OK;
}

ferry_status fault__plan_read(fault__plan *out)
{
    char held[FERRY__FAULT_TEXT_BYTES];

    FERRY_TRY(ferry__fault_text(held));
    return fault__plan_parse(held, out);
}

void fault__plan_draw(fault__plan *plan, uint64_t total)
{
    for (size_t i = 0; i < plan->n; i++) {
        if (!plan->rules[i].anywhere || total == 0)
            continue;
        plan->rules[i].at = ferry__fault_mix(plan->seed * 31 + i + 1) % total;
        plan->rules[i].anywhere = false;
    }
}

fault__rule *fault__plan_take(fault__plan *plan, fault__kind kind,
                              fault__where where, uint64_t first,
                              uint64_t count)
{
    for (size_t i = 0; i < plan->n; i++) {
        fault__rule *r = &plan->rules[i];

        if (r->kind != kind || r->where != where || r->fired || r->anywhere)
            continue;
        if (where <= FAULT__SENT && (r->at < first || r->at - first >= count))
            continue;
        r->fired = true;
        return r;
    }
    return NULL;
}

static ferry_status wait_ms(const fault__ground *g, int64_t ms,
                            const char *what)
{
    const ferry__deadline end = ferry__deadline_in(ms);
    int64_t left;

    while ((left = ferry__deadline_left_ms(&end)) > 0) {
        ferry__sleep_ms(left < SLICE_MS ? left : SLICE_MS);
        FERRY_TRY(g->check(g->arg, what));
    }
    return FERRY_OK;
}

static ferry_status delay_all(const fault__plan *plan, const fault__ground *g,
                              const char *what)
{
    for (size_t i = 0; i < plan->n; i++) {
        if (plan->rules[i].kind == FAULT__DELAY)
            FERRY_TRY(wait_ms(g, plan->rules[i].ms, what));
    }
    return FERRY_OK;
}

ferry_status fault__strike(fault__plan *plan, const fault__ground *g,
                           fault__where where, uint64_t first, uint64_t count,
                           const char *what, const char *name)
{
    const char *of = name[0] != '\0' ? " parameter " : "";
    const fault__rule *r;

    if (plan->n == 0)
        return FERRY_OK;
    if (where == FAULT__BYTE)
        FERRY_TRY(delay_all(plan, g, what));
    r = fault__plan_take(plan, FAULT__STALL, where, first, count);
    if (r != NULL)
        FERRY_TRY(wait_ms(g, r->ms, what));
    if (fault__plan_take(plan, FAULT__STOP, where, first, count) != NULL) {
        g->log(FERRY_LOG_INFO, "fault: %s stops while %s%s%s", g->side, what,
               of, name);
        raise(SIGSTOP);
    }
    if (fault__plan_take(plan, FAULT__DIE, where, first, count) != NULL) {
        g->log(FERRY_LOG_INFO, "fault: %s dies while %s%s%s", g->side, what, of,
               name);
        raise(SIGKILL);
    }
    r = fault__plan_take(plan, FAULT__FAIL, where, first, count);
    if (r != NULL)
        return g->fail(FERRY_EIO, "fault: %s fails while %s%s%s", g->side, what,
                       of, name);
    return FERRY_OK;
}

void fault__flip(const fault__plan *plan, const fault__rule *rule,
                 unsigned char *byte)
{
    ferry__fault_flip(plan->seed, rule->at, byte);
}
