/* SPDX-License-Identifier: Apache-2.0 */
/* The driver of the tests, found by its path. */
#include "harness/device.h"

#include "base/config.h"
#include "core/module.h"
#include "device/memory.h"
#include "harness/modules/cuda_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    __typeof__(cuda_host_hold) *hold;
    __typeof__(cuda_host_left) *left;
    __typeof__(cuda_host_fail) *fail;
    __typeof__(cuda_host_copies) *copies;
    __typeof__(cuda_host_reach) *reach;
} driver;

static void must(ferry_status status)
{
    if (status >= 0)
        return;
    fprintf(stderr, "the tests' device: %s\n", ferry_last_error());
    abort();
}

static void look_up(const char *path, const char *name, void *out)
{
    void *symbol = NULL;

    must(ferry__module_symbol(path, name, &symbol));
    memcpy(out, &symbol, sizeof(symbol));
}

void device_use(void)
{
    const char *folder = getenv("FERRY_TEST_MODULES");
    char path[4096];

    folder = folder ? folder : "tests/modules";
    snprintf(path, sizeof(path), "%s/nccl_device.so", folder);
    must(ferry__config_set("nccl_library", path));
    snprintf(path, sizeof(path), "%s/cuda_host.so", folder);
    must(ferry__config_set("cuda_library", path));
    look_up(path, "cuda_host_hold", &driver.hold);
    look_up(path, "cuda_host_left", &driver.left);
    look_up(path, "cuda_host_fail", &driver.fail);
    look_up(path, "cuda_host_copies", &driver.copies);
    look_up(path, "cuda_host_reach", &driver.reach);
}

static const ferry__memory *memory_of(int32_t ordinal)
{
    const ferry__memory *memory = NULL;

    must(ferry__memory_cuda(ordinal, &memory));
    return memory;
}

void *device_alloc(int32_t ordinal, size_t size_bytes)
{
    void *memory = NULL;

    must(memory_of(ordinal)->alloc(size_bytes, &memory));
    return memory;
}

int32_t device_count(void)
{
    return 2;
}

void device_write(int32_t ordinal, void *memory, const void *bytes,
                  size_t size_bytes)
{
    (void)ordinal;
    memcpy(driver.reach(memory), bytes, size_bytes);
}

void device_free(int32_t ordinal, void *memory)
{
    memory_of(ordinal)->free(memory);
}

void *device_bytes(const void *memory)
{
    return driver.reach(memory);
}

void device_hold(int hold)
{
    driver.hold(hold);
}

void device_fail(const void *memory)
{
    driver.fail(memory);
}

long device_copies(void)
{
    return driver.copies();
}

int device_left(void)
{
    return driver.left();
}
