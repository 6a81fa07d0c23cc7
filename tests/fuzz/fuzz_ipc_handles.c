/* SPDX-License-Identifier: Apache-2.0 */
/* Outside bytes of the ipc backend: the first byte chooses between the JSON
 * of handles and a frame of the socket. What is accepted must stay inside
 * its bounds and survive a round trip. */
#include "backends/ipc/ipc_wire.h"

#include "base/alloc.h"
#include "base/hash.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const ferry_param_meta params[3] = {
    {"w", FERRY_DTYPE_BF16, 2, {4, 3}},
    {"s", FERRY_DTYPE_F64, 0, {0}},
    {"v", FERRY_DTYPE_U8, 1, {1000}},
};

/* The lowest and the highest byte that the accepted view touches. */
static void touch_ends(const ferry__ipc_handle *h,
                       const ferry_param_meta *param, char *base, size_t size)
{
    ferry_tensor tensor;
    int64_t low = 0, high = 0;
    size_t elem = ferry_dtype_bytes(param->dtype);

    ferry__ipc_handle_tensor(h, param, base, &tensor);
    for (int32_t d = 0; d < tensor.ndim; d++) {
        int64_t reach = (tensor.shape[d] - 1) * tensor.stride[d];

        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    low = ((char *)tensor.data - base) + low * (int64_t)elem;
    high = ((char *)tensor.data - base) + (high + 1) * (int64_t)elem;
    if (low < 0 || high > (int64_t)size)
        abort();
}

static void try_handles(const char *text)
{
    static char memory[4096];
    ferry__ipc_handle *handles, *again;
    ferry__str s = {0};

    if (ferry__ipc_get_handles(text, params, 3, &handles) < 0)
        return;
    for (int i = 0; i < 3; i++) {
        if (ferry__ipc_handle_check(&handles[i], &params[i], sizeof(memory)) >=
                0 &&
            handles[i].kind == FERRY__IPC_SHARED)
            touch_ends(&handles[i], &params[i], memory, sizeof(memory));
    }
    ferry__ipc_put_handles(&s, handles, params, 3);
    if (ferry__ipc_get_handles(s.data, params, 3, &again) < 0)
        abort();
    if (ferry__ipc_handles_digest(handles, params, 3) !=
        ferry__ipc_handles_digest(again, params, 3))
        abort();
    ferry__free(again);
    ferry__free(handles);
    ferry__str_free(&s);
}

/* A fuzzer cannot guess a digest: the frame is given the right one, so that
 * what lies behind it is tried too. */
static void *with_digest(const void *bytes, size_t size)
{
    unsigned char *copy = malloc(size ? size : 1);
    uint64_t digest;

    memcpy(copy, bytes, size);
    if (size > 24 && ferry__ipc_frame_type(bytes, size) == FERRY__IPC_BOXES) {
        digest = ferry__xxh3(copy + 24, size - 24);
        for (int i = 0; i < 8; i++)
            copy[12 + i] = (unsigned char)(digest >> (8 * i));
    }
    return copy;
}

static void try_lists(const void *original, size_t size)
{
    void *bytes = with_digest(original, size);
    ferry__ipc_boxes boxes;
    ferry__ipc_ranges ranges;
    ferry__ipc_digests digests;

    if (ferry__ipc_get_boxes(bytes, size, &boxes) >= 0) {
        if (boxes.listed)
            ferry__box_lists_check(&boxes.lists, params, 3);
        ferry__box_lists_free(&boxes.lists);
    }
    if (ferry__ipc_get_ranges(bytes, size, &ranges) >= 0)
        ferry__free(ranges.items);
    if (ferry__ipc_get_digests(bytes, size, &digests) >= 0)
        ferry__free(digests.items);
    free(bytes);
}

static void try_frame(const void *bytes, size_t size)
{
    ferry__ipc_hello hello;
    ferry__ipc_welcome welcome;
    ferry__ipc_ready ready;
    ferry__ipc_failure failure;
    ferry__ipc_segment segment;
    ferry__ipc_update update;
    ferry__ipc_done done;
    uint64_t id;

    switch (ferry__ipc_frame_type(bytes, size)) {
    case FERRY__IPC_HELLO:
        if (ferry__ipc_get_hello(bytes, size, &hello) >= 0 &&
            strlen(hello.secret) > FERRY__IPC_SECRET_CHARS)
            abort();
        break;
    case FERRY__IPC_WELCOME:
        if (ferry__ipc_get_welcome(bytes, size, &welcome) >= 0 &&
            welcome.reader >= FERRY__IPC_MAX_READERS)
            abort();
        break;
    case FERRY__IPC_READY:
        ferry__ipc_get_ready(bytes, size, &ready);
        break;
    case FERRY__IPC_FAILURE:
        if (ferry__ipc_get_failure(bytes, size, &failure) >= 0 &&
            failure.status >= 0)
            abort();
        break;
    case FERRY__IPC_SEGMENT:
        ferry__ipc_get_segment(bytes, size, &segment);
        break;
    case FERRY__IPC_DROP:
        ferry__ipc_get_drop(bytes, size, &id);
        break;
    case FERRY__IPC_UPDATE:
        ferry__ipc_get_update(bytes, size, &update);
        break;
    case FERRY__IPC_DONE:
        ferry__ipc_get_done(bytes, size, &done);
        break;
    default:
        try_lists(bytes, size);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    if (data[0] == 'F') {
        try_frame(data + 1, size - 1);
    } else {
        char *text = malloc(size + 1);

        memcpy(text, data, size);
        text[size] = '\0';
        try_handles(text);
        free(text);
    }
    return 0;
}
