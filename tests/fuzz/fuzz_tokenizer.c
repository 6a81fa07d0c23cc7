/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json: one that opens gives ids of its own for any text, or an
 * error. ctest: link=worker */
#include "base/alloc.h"
#include "model/tokenizer_parts.h"

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char TEXT[] = "the abc  123 \xC3\xA9\n\n<|end|> x";

static void encode(const ferry__tokenizer *t)
{
    int32_t *ids = NULL;
    size_t n = 0, i, length, total = 0;

    if (ferry__tokenizer_encode(t, TEXT, sizeof(TEXT) - 1, &ids, &n) < 0)
        return;
    for (i = 0; i < n; i++) {
        assert(ferry__tokenizer_bytes(t, ids[i], true, &length));
        total += length;
    }
    /* Merges of a hostile file may lead to any token; ids stay its own. */
    assert(total > 0);
    ferry__free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ferry__tokenizer *t = ferry__alloc(sizeof(*t));
    char path[64];
    int fd = memfd_create("tokenizer", MFD_CLOEXEC);

    if (!t || fd < 0)
        return 0;
    t->bos = -1;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (write(fd, data, size) == (ssize_t)size &&
        ferry__tokenizer_from_json(path, t) == FERRY_OK)
        encode(t);
    close(fd);
    ferry__tokenizer_close(&t);
    return 0;
}
