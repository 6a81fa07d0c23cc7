/* SPDX-License-Identifier: Apache-2.0 */
/* config.json: what is read without error is in bounds, and every question
 * about cutting it gets an answer. ctest: link=worker */
#include "model/model_config_parts.h"

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void look_at(const char *path)
{
    ferry__model_config config = {.bos_id = -1};
    int32_t tp;

    if (ferry__config_from_json(path, &config) < 0 ||
        ferry__config_validate(&config) < 0)
        return;
    assert(config.n_heads % config.n_kv_heads == 0);
    assert(ferry__rope_freq_factor(&config, 0) > 0);
    for (tp = 0; tp < 9; tp++)
        (void)ferry__model_config_check(&config, tp, FERRY_DTYPE_Q8_0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    int fd = memfd_create("config", MFD_CLOEXEC);

    if (fd < 0)
        return 0;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (write(fd, data, size) == (ssize_t)size)
        look_at(path);
    close(fd);
    return 0;
}
