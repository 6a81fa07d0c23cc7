/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of devices for tests, of the driver that modules/cuda_host.c plays:
 * the host reaches it by name only. */
#ifndef FERRY_TESTS_HARNESS_DEVICE_H
#define FERRY_TESTS_HARNESS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#define DEVICES 2

/* Has the library use that driver, and provider nccl a library that takes
 * memory of its devices alone. Before any rank is a thread. */
void device_use(void);
void *device_alloc(int32_t ordinal, size_t size_bytes);
void device_free(int32_t ordinal, void *memory);
/* Where the host reaches what lies at an address of a device. */
void *device_bytes(const void *memory);
/* See cuda_host.h. */
void device_hold(int hold);
void device_fail(const void *memory);
long device_copies(void);
int device_left(void);

#endif
