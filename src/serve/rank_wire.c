/* SPDX-License-Identifier: Apache-2.0 */
/* Frames between the API process and the ranks; see rank_wire.h. */
#include "serve/rank_wire.h"

#include "base/alloc.h"
#include "base/log.h"

#include <string.h>

typedef struct reply_head {
    int32_t status;
    uint32_t line_length;
} reply_head;

ferry_status ferry__rank_send(int fd, ferry__rank_kind kind, const void *body,
                              size_t size_bytes, const ferry__waiter *w)
{
    uint32_t head[2] = {(uint32_t)kind, 0};
    char *frame = ferry__alloc_raw(sizeof head + size_bytes);
    ferry_status st;

    if (frame == NULL)
        return FERRY_ENOMEM;
    memcpy(frame, head, sizeof head);
    if (size_bytes > 0)
        memcpy(frame + sizeof head, body, size_bytes);
    st = ferry__send_frame(fd, frame, sizeof head + size_bytes, w);
    ferry__free(frame);
    return st;
}

ferry_status ferry__rank_reply(int fd, ferry_status status, const void *body,
                               size_t size_bytes, const ferry__waiter *w)
{
    const char *line = status < 0 ? ferry_last_error() : "";
    reply_head head = {status, (uint32_t)strlen(line)};
    size_t total = sizeof head + head.line_length + size_bytes;
    char *frame = ferry__alloc_raw(total);
    ferry_status st;

    if (frame == NULL)
        return FERRY_ENOMEM;
    memcpy(frame, &head, sizeof head);
    memcpy(frame + sizeof head, line, head.line_length);
    if (size_bytes > 0)
        memcpy(frame + sizeof head + head.line_length, body, size_bytes);
    st = ferry__send_frame(fd, frame, total, w);
    ferry__free(frame);
    return st;
}

ferry_status ferry__rank_receive(int fd, const ferry__waiter *w,
                                 ferry_status *out_status, void **out_body,
                                 size_t *out_size)
{
    void *frame = NULL;
    char *bytes;
    size_t size = 0, left;
    reply_head head;
    char line[1024] = "";

    FERRY_TRY(ferry__recv_frame(fd, FERRY__RANK_FRAME_MAX, &frame, &size, w));
    if (size < sizeof head) {
        ferry__free(frame);
        return ferry_fail(FERRY_EINTERNAL, "rank reply of %zu bytes is short",
                          size);
    }
    memcpy(&head, frame, sizeof head);
    bytes = (char *)frame + sizeof head;
    left = size - sizeof head;
    if (head.line_length > left || head.line_length >= sizeof line) {
        ferry__free(frame);
        return ferry_fail(FERRY_EINTERNAL,
                          "rank reply has a line of %u of "
                          "%zu bytes",
                          head.line_length, left);
    }
    memcpy(line, bytes, head.line_length);
    line[head.line_length] = '\0';
    left -= head.line_length;
    *out_status = (ferry_status)head.status;
    if (head.status < 0)
        (void)ferry__fail_line(*out_status, line);
    if (out_body != NULL) {
        /* The body moves to the front, so that the frame itself is it. */
        memmove(frame, bytes + head.line_length, left);
        ((char *)frame)[left] = '\0';
        *out_body = frame;
        *out_size = left;
    } else {
        ferry__free(frame);
    }
    return FERRY_OK;
}
