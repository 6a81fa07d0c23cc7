/* SPDX-License-Identifier: Apache-2.0 */
/* A reader of the pickle opcodes that torch's CUDA IPC tuples are written
 * with, and of no others.
 * Invariant: memory is bounded by the pickle's size, for a shared value is an
 * index, never a copy. */
#include "backends/ipc/ipc_wire_pickle.h"

#include "base/alloc.h"

#include <string.h>

/* A handle has more than 3 bytes a value, however much of it is shared. */
#define VALUES_MAX(size_bytes) ((size_bytes) / 3 + 64)

typedef struct machine {
    const unsigned char *bytes;
    size_t size, at, op_at; /* op_at: of the opcode that is being done */
    ferry__pickle *out;
    uint32_t *stack, *memo; /* indexes of values; owned */
    size_t depth, stack_room, n_memo, memo_room;
} machine;

static ferry_status refuse(const machine *m, const char *why)
{
    if (m->op_at >= m->size)
        return ferry_fail(FERRY_EINVAL, "pickle ends at offset %zu: %s",
                          m->op_at, why);
    return ferry_fail(FERRY_EINVAL, "pickle opcode 0x%02x at offset %zu: %s",
                      m->bytes[m->op_at], m->op_at, why);
}

/* ---- bytes ---- */

static ferry_status take(machine *m, size_t n, const unsigned char **out)
{
    if (n > m->size - m->at)
        return refuse(m, "its argument is cut off");
    *out = m->bytes + m->at;
    m->at += n;
    return FERRY_OK;
}

/* Little endian, at most 8 bytes. */
static ferry_status take_number(machine *m, size_t n, uint64_t *out)
{
    const unsigned char *bytes;

    FERRY_TRY(take(m, n, &bytes));
    *out = 0;
    for (size_t i = 0; i < n; i++)
        *out |= (uint64_t)bytes[i] << (8 * i);
    return FERRY_OK;
}

/* ---- values ---- */

static ferry__pickle_value *value_of(const machine *m, uint32_t index)
{
    return &m->out->values[index];
}

static ferry_status push(machine *m, uint32_t index)
{
    FERRY_TRY(
        ferry__grow(&m->stack, &m->stack_room, m->depth, sizeof(*m->stack)));
    m->stack[m->depth++] = index;
    return FERRY_OK;
}

static ferry_status push_new(machine *m, ferry__pickle_kind kind,
                             ferry__pickle_value **out)
{
    ferry__pickle *p = m->out;

    if (p->n_values >= VALUES_MAX(m->size))
        return refuse(m, "more values than handles of that size have");
    FERRY_TRY(
        ferry__grow(&p->values, &p->capacity, p->n_values, sizeof(*p->values)));
    FERRY_TRY(push(m, (uint32_t)p->n_values));
    *out = &p->values[p->n_values++];
    memset(*out, 0, sizeof(**out));
    (*out)->kind = kind;
    (*out)->at = m->op_at;
    return FERRY_OK;
}

static ferry_status push_number(machine *m, ferry__pickle_kind kind,
                                int64_t number)
{
    ferry__pickle_value *value;

    FERRY_TRY(push_new(m, kind, &value));
    value->number = number;
    return FERRY_OK;
}

static ferry_status push_bytes(machine *m, ferry__pickle_kind kind)
{
    const unsigned char *bytes;
    ferry__pickle_value *value;
    uint64_t n;

    FERRY_TRY(take_number(m, 1, &n));
    FERRY_TRY(take(m, (size_t)n, &bytes));
    FERRY_TRY(push_new(m, kind, &value));
    value->bytes = bytes;
    value->size = (size_t)n;
    return FERRY_OK;
}

/* The topmost n values, none of which is a mark. */
static ferry_status top(const machine *m, size_t n, const uint32_t **out)
{
    if (n > m->depth)
        return refuse(m, "the stack is too short");
    *out = m->stack + m->depth - n;
    for (size_t i = 0; i < n; i++) {
        if (value_of(m, (*out)[i])->kind == FERRY__PICKLE_MARK)
            return refuse(m, "a mark is in its way");
    }
    return FERRY_OK;
}

static ferry_status since_mark(const machine *m, size_t *out_n)
{
    for (size_t n = 0; n < m->depth; n++) {
        if (value_of(m, m->stack[m->depth - 1 - n])->kind ==
            FERRY__PICKLE_MARK) {
            *out_n = n;
            return FERRY_OK;
        }
    }
    return refuse(m, "there is no mark");
}

static ferry_status add_items(ferry__pickle_value *to, const uint32_t *items,
                              size_t n)
{
    for (size_t i = 0; i < n; i++) {
        FERRY_TRY(ferry__grow(&to->items, &to->capacity, to->size,
                              sizeof(*to->items)));
        to->items[to->size++] = items[i];
    }
    return FERRY_OK;
}

/* Replaces the topmost n values, and `below` more, by a new one of them. */
static ferry_status fold(machine *m, ferry__pickle_kind kind, size_t n,
                         size_t below)
{
    ferry__pickle_value *value;
    const uint32_t *items;
    uint32_t index;

    FERRY_TRY(top(m, n, &items));
    FERRY_TRY(push_new(m, kind, &value));
    FERRY_TRY(add_items(value, m->stack + m->depth - 1 - n, n));
    index = m->stack[m->depth - 1];
    m->depth -= n + below + 1;
    return push(m, index);
}

/* ---- opcodes ---- */

static ferry_status do_tuple(machine *m)
{
    size_t n;

    FERRY_TRY(since_mark(m, &n));
    return fold(m, FERRY__PICKLE_TUPLE, n, 1);
}

static ferry_status do_global(machine *m)
{
    const uint32_t *pair;

    FERRY_TRY(top(m, 2, &pair));
    if (value_of(m, pair[0])->kind != FERRY__PICKLE_TEXT ||
        value_of(m, pair[1])->kind != FERRY__PICKLE_TEXT)
        return refuse(m, "module and name must be texts");
    return fold(m, FERRY__PICKLE_GLOBAL, 2, 0);
}

static bool is_text(const ferry__pickle_value *value, const char *text)
{
    return value->size == strlen(text) &&
           memcmp(value->bytes, text, value->size) == 0;
}

/* Nothing is called: the one call that is known makes a torch.Size, which is
 * a tuple under another name. */
static ferry_status do_reduce(machine *m)
{
    ferry__pickle_value *call, *arguments, *value;
    const uint32_t *pair;
    uint32_t inner, index;

    FERRY_TRY(top(m, 2, &pair));
    call = value_of(m, pair[0]);
    arguments = value_of(m, pair[1]);
    if (call->kind != FERRY__PICKLE_GLOBAL ||
        !is_text(value_of(m, call->items[0]), "torch") ||
        !is_text(value_of(m, call->items[1]), "Size"))
        return refuse(m, "only torch.Size may be made");
    if (arguments->kind != FERRY__PICKLE_TUPLE || arguments->size != 1 ||
        value_of(m, arguments->items[0])->kind != FERRY__PICKLE_TUPLE)
        return refuse(m, "torch.Size is made of one tuple");
    inner = arguments->items[0];
    if (value_of(m, inner)->size > FERRY_MAX_DIMS)
        return refuse(m, "a torch.Size of too many dimensions");
    FERRY_TRY(push_new(m, FERRY__PICKLE_SIZE, &value));
    FERRY_TRY(
        add_items(value, value_of(m, inner)->items, value_of(m, inner)->size));
    index = m->stack[m->depth - 1];
    m->depth -= 3;
    return push(m, index);
}

/* Moves the topmost n values into the list or dict below them. */
static ferry_status gather(machine *m, ferry__pickle_kind kind, size_t n,
                           size_t marks)
{
    ferry__pickle_value *into;
    const uint32_t *items;

    FERRY_TRY(top(m, n, &items));
    if (m->depth < n + marks + 1)
        return refuse(m, "the stack is too short");
    into = value_of(m, m->stack[m->depth - 1 - n - marks]);
    if (into->kind != kind || (kind == FERRY__PICKLE_DICT && n % 2 != 0))
        return refuse(m, "what it adds to is of another kind");
    FERRY_TRY(add_items(into, items, n));
    m->depth -= n + marks;
    return FERRY_OK;
}

static ferry_status gather_marked(machine *m, ferry__pickle_kind kind)
{
    size_t n;

    FERRY_TRY(since_mark(m, &n));
    return gather(m, kind, n, 1);
}

static ferry_status do_memoize(machine *m)
{
    const uint32_t *value;

    FERRY_TRY(top(m, 1, &value));
    FERRY_TRY(
        ferry__grow(&m->memo, &m->memo_room, m->n_memo, sizeof(*m->memo)));
    m->memo[m->n_memo++] = *value;
    return FERRY_OK;
}

/* A container that is still open cannot be had again: else it could hold
 * itself. */
static ferry_status do_get(machine *m, size_t width)
{
    ferry__pickle_kind kind;
    uint64_t index;

    FERRY_TRY(take_number(m, width, &index));
    if (index >= m->n_memo)
        return refuse(m, "nothing was kept under that number");
    kind = value_of(m, m->memo[index])->kind;
    if (kind == FERRY__PICKLE_LIST || kind == FERRY__PICKLE_DICT)
        return refuse(m, "a list or dict is used twice");
    return push(m, m->memo[index]);
}

static ferry_status do_int(machine *m, size_t width)
{
    uint64_t v;

    FERRY_TRY(take_number(m, width, &v));
    return push_number(m, FERRY__PICKLE_INT,
                       width == 4 ? (int64_t)(int32_t)(uint32_t)v : (int64_t)v);
}

static ferry_status do_long(machine *m)
{
    uint64_t n, v;

    FERRY_TRY(take_number(m, 1, &n));
    if (n == 0 || n > 8)
        return refuse(m, "a number of that many bytes");
    FERRY_TRY(take_number(m, (size_t)n, &v));
    if (n < 8 && (v >> (8 * n - 1)) & 1)
        v |= UINT64_MAX << (8 * n);
    return push_number(m, FERRY__PICKLE_INT, (int64_t)v);
}

static ferry_status do_frame(machine *m)
{
    uint64_t n;

    FERRY_TRY(take_number(m, 8, &n));
    return n > m->size - m->at ? refuse(m, "its frame is cut off") : FERRY_OK;
}

static ferry_status push_empty(machine *m, ferry__pickle_kind kind)
{
    return push_number(m, kind, 0);
}

static ferry_status do_scalar(machine *m, unsigned char op)
{
    switch (op) {
    case 'K':
        return do_int(m, 1);
    case 'M':
        return do_int(m, 2);
    case 'J':
        return do_int(m, 4);
    case 0x8a:
        return do_long(m);
    case 0x88:
    case 0x89:
        return push_number(m, FERRY__PICKLE_BOOL, op == 0x88);
    case 0x8c:
        return push_bytes(m, FERRY__PICKLE_TEXT);
    case 'C':
        return push_bytes(m, FERRY__PICKLE_BYTES);
    case 'h':
        return do_get(m, 1);
    case 'j':
        return do_get(m, 4);
    default:
        return refuse(m, "is not of a CUDA IPC handle; nothing was run");
    }
}

static ferry_status do_opcode(machine *m, unsigned char op)
{
    switch (op) {
    case 0x95:
        return do_frame(m);
    case 0x94:
        return do_memoize(m);
    case '(':
        return push_empty(m, FERRY__PICKLE_MARK);
    case ']':
        return push_empty(m, FERRY__PICKLE_LIST);
    case '}':
        return push_empty(m, FERRY__PICKLE_DICT);
    case ')':
        return push_empty(m, FERRY__PICKLE_TUPLE);
    case 0x85:
    case 0x86:
    case 0x87:
        return fold(m, FERRY__PICKLE_TUPLE, (size_t)op - 0x84, 0);
    case 't':
        return do_tuple(m);
    case 0x93:
        return do_global(m);
    case 'R':
        return do_reduce(m);
    case 'a':
        return gather(m, FERRY__PICKLE_LIST, 1, 0);
    case 'e':
        return gather_marked(m, FERRY__PICKLE_LIST);
    case 's':
        return gather(m, FERRY__PICKLE_DICT, 2, 0);
    case 'u':
        return gather_marked(m, FERRY__PICKLE_DICT);
    default:
        return do_scalar(m, op);
    }
}

static ferry_status run(machine *m)
{
    const unsigned char *op;
    uint64_t protocol;

    if (m->size < 2 || m->bytes[0] != 0x80)
        return refuse(m, "a pickle begins with its protocol, 0x80");
    m->at = 1;
    FERRY_TRY(take_number(m, 1, &protocol));
    if (protocol != 4 && protocol != 5)
        return refuse(m, "protocol must be 4 or 5");
    for (;;) {
        m->op_at = m->at;
        FERRY_TRY(take(m, 1, &op));
        if (*op == '.')
            break;
        FERRY_TRY(do_opcode(m, *op));
    }
    if (m->depth != 1 || m->at != m->size)
        return refuse(m, "one value must be left, and no byte");
    m->out->top = m->stack[0];
    return FERRY_OK;
}

ferry_status ferry__pickle_read(const void *bytes, size_t size_bytes,
                                ferry__pickle *out)
{
    machine m = {.bytes = bytes, .size = size_bytes, .out = out};
    ferry_status st;

    memset(out, 0, sizeof(*out));
    if (size_bytes > FERRY__PICKLE_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "pickle of %zu bytes; at most %zu are read",
                          size_bytes, FERRY__PICKLE_MAX);
    st = run(&m);
    ferry__free(m.stack);
    ferry__free(m.memo);
    if (st < 0)
        ferry__pickle_free(out);
    return st;
}

void ferry__pickle_free(ferry__pickle *p)
{
    for (size_t i = 0; i < p->n_values; i++)
        ferry__free(p->values[i].items);
    ferry__free(p->values);
    memset(p, 0, sizeof(*p));
}
