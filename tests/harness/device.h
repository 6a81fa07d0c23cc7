/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of devices for tests: of the driver that modules/cuda_host.c plays,
 * or, in tests/gpu, of a real one, which has none of the functions at the
 * end. */
#ifndef FERRY_TESTS_HARNESS_DEVICE_H
#define FERRY_TESTS_HARNESS_DEVICE_H

#include <stddef.h>
#include <stdint.h>

int32_t device_count(void); /* at most 2 */
void *device_alloc(int32_t ordinal, size_t size_bytes);
void device_free(int32_t ordinal, void *memory);
/* Done on return. */
void device_write(int32_t ordinal, void *memory, const void *bytes,
                  size_t size_bytes);

/* Has the library use the driver that is played, and provider nccl a library
 * that takes memory of its devices alone. Before any rank is a thread. */
void device_use(void);
/* Where the host reaches what lies at an address of a device. */
void *device_bytes(const void *memory);
/* See cuda_host.h. */
void device_hold(int hold);
void device_fail(const void *memory);
long device_copies(void);
int device_left(void);

#endif
