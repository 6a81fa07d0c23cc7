/* SPDX-License-Identifier: Apache-2.0 */
/* Closing a source. */
#include <ferry/source.h>

void ferry_source_close(ferry_source *source)
{
    if (source == NULL || source->ops == NULL)
        return;
    if (source->ops->size >=
            offsetof(ferry_source_ops, close) + sizeof(source->ops->close) &&
        source->ops->close != NULL)
        source->ops->close(source->self);
    source->ops = NULL;
    source->self = NULL;
}
