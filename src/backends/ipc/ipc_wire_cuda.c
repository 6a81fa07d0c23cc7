/* SPDX-License-Identifier: Apache-2.0 */
/* What a pickle of CUDA IPC handles means: a list of dicts, or one dict, from
 * device names to the arguments of torch's rebuild_cuda_tensor.
 * Invariant: a handle that comes out has every field, of the right kind. */
#include "backends/ipc/ipc_wire_pickle.h"

#include "base/alloc.h"
#include "base/str.h"

#include <string.h>

#define N_ARGUMENTS 15

typedef struct reader {
    ferry__pickle pickle;
    ferry__cuda_handles *out;
    size_t n_items, room;
} reader;

static const ferry__pickle_value *value_of(const reader *r, uint32_t index)
{
    return &r->pickle.values[index];
}

static const char *kind_name(ferry__pickle_kind kind)
{
    static const char *const names[] = {
        "nothing",  "a mark",  "an integer",   "a bool", "a text", "bytes",
        "a global", "a tuple", "a torch.Size", "a dict", "a list"};

    return names[kind];
}

static ferry_status is_no(const ferry__pickle_value *value, const char *what,
                          const char *want)
{
    return ferry_fail(FERRY_EINVAL,
                      "%s must be %s, got %s at offset %zu of the pickle", what,
                      want, kind_name(value->kind), value->at);
}

/* ---- the fields of a handle ---- */

static ferry_status get_int(const ferry__pickle_value *value, const char *what,
                            int64_t *out)
{
    if (value->kind != FERRY__PICKLE_INT || value->number < 0)
        return is_no(value, what, "an integer >= 0");
    *out = value->number;
    return FERRY_OK;
}

static ferry_status get_bool(const ferry__pickle_value *value, const char *what,
                             bool *out)
{
    if (value->kind != FERRY__PICKLE_BOOL)
        return is_no(value, what, "a bool");
    *out = value->number != 0;
    return FERRY_OK;
}

static ferry_status get_bytes(const ferry__pickle_value *value,
                              const char *what, ferry__cuda_bytes *out)
{
    if (value->kind != FERRY__PICKLE_BYTES)
        return is_no(value, what, "bytes");
    out->data = value->bytes;
    out->size = value->size;
    return FERRY_OK;
}

static ferry_status get_dims(const reader *r, const ferry__pickle_value *value,
                             const char *what, int64_t *out, int32_t *out_n)
{
    if (value->size > FERRY_MAX_DIMS)
        return is_no(value, what, "of at most 8 dimensions");
    for (size_t i = 0; i < value->size; i++)
        FERRY_TRY(get_int(value_of(r, value->items[i]), what, &out[i]));
    *out_n = (int32_t)value->size;
    return FERRY_OK;
}

static bool is_text(const ferry__pickle_value *value, const char *text)
{
    return value->kind == FERRY__PICKLE_TEXT && value->size == strlen(text) &&
           memcmp(value->bytes, text, value->size) == 0;
}

static bool is_global(const reader *r, const ferry__pickle_value *value,
                      const char *module, const char *name)
{
    return value->kind == FERRY__PICKLE_GLOBAL &&
           is_text(value_of(r, value->items[0]), module) &&
           is_text(value_of(r, value->items[1]), name);
}

static ferry_status get_classes(const reader *r,
                                const ferry__pickle_value *tensor,
                                const ferry__pickle_value *storage,
                                ferry__cuda_handle *out)
{
    out->is_parameter = is_global(r, tensor, "torch.nn.parameter", "Parameter");
    if (!out->is_parameter && !is_global(r, tensor, "torch", "Tensor"))
        return is_no(tensor, "the tensor's class",
                     "torch.Tensor or torch.nn.Parameter");
    out->typed_storage = is_global(r, storage, "torch.storage", "TypedStorage");
    if (!out->typed_storage &&
        !is_global(r, storage, "torch.storage", "UntypedStorage"))
        return is_no(storage, "the storage's class",
                     "torch.storage.TypedStorage or UntypedStorage");
    return FERRY_OK;
}

static ferry_status get_dtype(const reader *r, const ferry__pickle_value *value,
                              ferry_dtype *out)
{
    const ferry__pickle_value *name;
    char text[32];

    if (value->kind != FERRY__PICKLE_GLOBAL ||
        !is_text(value_of(r, value->items[0]), "torch"))
        return is_no(value, "the dtype", "one of torch's");
    name = value_of(r, value->items[1]);
    if (name->size >= sizeof(text))
        return is_no(value, "the dtype", "one of torch's");
    memcpy(text, name->bytes, name->size);
    text[name->size] = '\0';
    /* Aliases are for people; a pickle has torch's own names. */
    if (ferry_dtype_parse(text, out) < 0 ||
        strcmp(ferry_dtype_name(*out), text) != 0)
        return is_no(value, "the dtype", "one of torch's");
    return FERRY_OK;
}

static ferry_status get_place(const reader *r, const uint32_t *items,
                              ferry__cuda_handle *out)
{
    const ferry__pickle_value *size = value_of(r, items[1]);
    const ferry__pickle_value *stride = value_of(r, items[2]);
    int32_t n;

    if (size->kind != FERRY__PICKLE_SIZE)
        return is_no(size, "the size", "a torch.Size");
    if (stride->kind != FERRY__PICKLE_TUPLE)
        return is_no(stride, "the stride", "a tuple");
    FERRY_TRY(get_dims(r, size, "the size", out->shape, &out->ndim));
    FERRY_TRY(get_dims(r, stride, "the stride", out->stride, &n));
    if (n != out->ndim)
        return is_no(stride, "the stride", "as long as the size");
    FERRY_TRY(get_int(value_of(r, items[3]), "the offset", &out->offset));
    return get_int(value_of(r, items[6]), "the device", &out->device);
}

static ferry_status get_handle(const reader *r,
                               const ferry__pickle_value *value,
                               ferry__cuda_handle *out)
{
    const uint32_t *items = value->items;

    if (value->kind != FERRY__PICKLE_TUPLE || value->size != N_ARGUMENTS)
        return is_no(value, "a handle", "a tuple of 15");
    FERRY_TRY(
        get_classes(r, value_of(r, items[0]), value_of(r, items[4]), out));
    FERRY_TRY(get_place(r, items, out));
    FERRY_TRY(get_dtype(r, value_of(r, items[5]), &out->dtype));
    FERRY_TRY(get_bytes(value_of(r, items[7]), "the handle", &out->handle));
    FERRY_TRY(get_int(value_of(r, items[8]), "the storage's size",
                      &out->storage_bytes));
    FERRY_TRY(get_int(value_of(r, items[9]), "the storage's offset",
                      &out->storage_offset));
    FERRY_TRY(
        get_bool(value_of(r, items[10]), "requires_grad", &out->requires_grad));
    FERRY_TRY(get_bytes(value_of(r, items[11]), "the counter's handle",
                        &out->ref_counter));
    FERRY_TRY(get_int(value_of(r, items[12]), "the counter's offset",
                      &out->ref_counter_offset));
    FERRY_TRY(
        get_bytes(value_of(r, items[13]), "the event's handle", &out->event));
    return get_bool(value_of(r, items[14]), "the event's flag",
                    &out->event_sync_required);
}

/* ---- the dicts ---- */

static ferry_status add_handle(reader *r, const ferry__pickle_value *key,
                               const ferry__pickle_value *value)
{
    ferry__cuda_handle *handle;

    if (key->kind != FERRY__PICKLE_TEXT || key->size == 0)
        return is_no(key, "a device's name", "a text");
    FERRY_TRY(ferry__grow(&r->out->items, &r->room, r->n_items,
                          sizeof(*r->out->items)));
    handle = &r->out->items[r->n_items];
    memset(handle, 0, sizeof(*handle));
    handle->key.data = key->bytes;
    handle->key.size = key->size;
    FERRY_TRY(get_handle(r, value, handle));
    r->n_items++;
    return FERRY_OK;
}

static ferry_status add_entry(reader *r, size_t entry,
                              const ferry__pickle_value *dict)
{
    if (dict->kind != FERRY__PICKLE_DICT || dict->size == 0)
        return is_no(dict, "handles of a parameter",
                     "a dict with a device's name");
    for (size_t i = 0; i < dict->size; i += 2)
        FERRY_TRY(add_handle(r, value_of(r, dict->items[i]),
                             value_of(r, dict->items[i + 1])));
    r->out->first[entry + 1] = r->n_items;
    return FERRY_OK;
}

static ferry_status read_all(reader *r)
{
    const ferry__pickle_value *whole = value_of(r, r->pickle.top);

    r->out->packed = whole->kind == FERRY__PICKLE_DICT;
    if (!r->out->packed && whole->kind != FERRY__PICKLE_LIST)
        return is_no(whole, "handles", "a list or a dict");
    r->out->n_entries = r->out->packed ? 1 : whole->size;
    r->out->first =
        ferry__alloc_array(r->out->n_entries + 1, sizeof(*r->out->first));
    if (r->out->first == NULL)
        return FERRY_ENOMEM;
    if (r->out->packed)
        return add_entry(r, 0, whole);
    for (size_t i = 0; i < whole->size; i++)
        FERRY_TRY(add_entry(r, i, value_of(r, whole->items[i])));
    return FERRY_OK;
}

ferry_status ferry__cuda_handles_read(unsigned char *pickle, size_t size_bytes,
                                      ferry__cuda_handles *out)
{
    reader r = {.out = out};
    ferry_status st;

    memset(out, 0, sizeof(*out));
    FERRY_TRY(ferry__pickle_read(pickle, size_bytes, &r.pickle));
    st = read_all(&r);
    ferry__pickle_free(&r.pickle);
    if (st < 0)
        ferry__cuda_handles_free(out);
    else
        out->pickle = pickle;
    return st;
}

void ferry__cuda_handles_free(ferry__cuda_handles *h)
{
    ferry__free(h->first);
    ferry__free(h->items);
    ferry__free(h->pickle);
    memset(h, 0, sizeof(*h));
}

ferry_status ferry__cuda_handles_find(const ferry__cuda_handles *h,
                                      size_t entry, const char *key,
                                      const ferry__cuda_handle **out)
{
    ferry__str have = {0};
    ferry_status st;

    for (size_t i = h->first[entry]; i < h->first[entry + 1]; i++) {
        const ferry__cuda_handle *item = &h->items[i];

        if (item->key.size == strlen(key) &&
            memcmp(item->key.data, key, item->key.size) == 0) {
            *out = item;
            return FERRY_OK;
        }
        if (have.length < 400)
            ferry__str_printf(&have, "%s%.*s", have.length ? ", " : "",
                              (int)item->key.size,
                              (const char *)item->key.data);
    }
    st = ferry_fail(FERRY_EMISMATCH,
                    "IPC handle not found for device %s; there are handles "
                    "for %s",
                    key, have.data ? have.data : "none");
    ferry__str_free(&have);
    return st;
}

/* ---- base64 ---- */

static int digit_of(unsigned char c)
{
    static const char digits[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *found = c ? memchr(digits, c, 64) : NULL;

    return found ? (int)(found - digits) : -1;
}

static ferry_status not_base64(size_t at)
{
    return ferry_fail(FERRY_EINVAL,
                      "is no standard base64 with padding, from character %zu",
                      at);
}

/* `out` has room for length / 4 * 3 bytes. */
static ferry_status from_base64(const char *text, size_t length,
                                unsigned char *out, size_t *out_size)
{
    size_t padding = length > 0 && text[length - 1] == '=' ? 1 : 0;
    size_t got = 0;
    uint32_t v = 0;

    padding += padding && length > 1 && text[length - 2] == '=';
    for (size_t i = 0; i < length - padding; i++) {
        int digit = digit_of((unsigned char)text[i]);

        if (digit < 0)
            return not_base64(i);
        v = v << 6 | (uint32_t)digit;
        if (i % 4 != 0)
            out[got++] = (unsigned char)(v >> (6 - i % 4 * 2));
    }
    if (length % 4 != 0 || length == 0)
        return not_base64(length);
    if (v & (padding == 2 ? 0xfu : padding == 1 ? 0x3u : 0))
        return not_base64(length - padding - 1);
    *out_size = got;
    return FERRY_OK;
}

ferry_status ferry__cuda_handles_decode(const char *text, size_t length,
                                        ferry__cuda_handles *out)
{
    unsigned char *pickle;
    size_t size = 0;
    ferry_status st;

    memset(out, 0, sizeof(*out));
    if (length / 4 * 3 > FERRY__PICKLE_MAX)
        return ferry_fail(FERRY_EINVAL,
                          "has %zu characters; at most %zu bytes are decoded",
                          length, FERRY__PICKLE_MAX);
    pickle = ferry__alloc(length / 4 * 3 + 3);
    if (pickle == NULL)
        return FERRY_ENOMEM;
    st = from_base64(text, length, pickle, &size);
    if (st >= 0)
        st = ferry__cuda_handles_read(pickle, size, out);
    if (st < 0)
        ferry__free(pickle);
    return st;
}
