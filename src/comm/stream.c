/* SPDX-License-Identifier: Apache-2.0 */
/* Which kind of stream a group has, and what every kind refuses alike. */
#include "comm/stream.h"

#include "base/alloc.h"

static ferry_status check_options(const ferry__comm *c,
                                  const ferry__stream_options *o)
{
    size_t bound;

    if (o->root < 0 || o->root >= c->world_size)
        return ferry_fail(FERRY_EINVAL, "stream: root %d of a world of %d",
                          o->root, c->world_size);
    if (o->n_buffers < 1)
        return ferry_fail(FERRY_EINVAL,
                          "stream: n_buffers must be at least 1, got %d",
                          o->n_buffers);
    if (o->timeout_ms <= 0 || o->no_progress_ms < 0)
        return ferry_fail(FERRY_EINVAL,
                          "stream: timeout_ms must be above 0, got %lld, and "
                          "no_progress_ms 0 or more, got %lld",
                          (long long)o->timeout_ms,
                          (long long)o->no_progress_ms);
    if (!ferry__mul((size_t)o->n_buffers, o->buffer_bytes, &bound) ||
        bound > PTRDIFF_MAX / 2)
        return ferry_fail(FERRY_EOVERFLOW, "stream: %d buffers of %llu bytes",
                          o->n_buffers, (unsigned long long)o->buffer_bytes);
    return FERRY_OK;
}

ferry_status ferry__stream_open(ferry__comm *c,
                                const ferry__stream_options *options,
                                ferry__stream **out)
{
    FERRY_TRY(check_options(c, options));
    if (c->ops->stream_open)
        return c->ops->stream_open(c, options, out);
    return ferry__stream_buffered(c, options, out);
}

void ferry__stream_close(ferry__stream **stream)
{
    if (!stream || !*stream)
        return;
    (*stream)->ops->close(*stream);
    *stream = NULL;
}
