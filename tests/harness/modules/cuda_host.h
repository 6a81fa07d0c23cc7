/* SPDX-License-Identifier: Apache-2.0 */
/* What tests ask of the driver that cuda_host.c plays, by name, beside the
 * driver's own calls. */
#ifndef FERRY_TESTS_CUDA_HOST_H
#define FERRY_TESTS_CUDA_HOST_H

#include "device/cuda_driver.h"

/* While it is held a device finishes nothing. */
void cuda_host_hold(int hold);
/* Blocks, streams and events that live. */
int cuda_host_left(void);
/* Contexts that this thread has pushed and not popped. */
int cuda_host_depth(void);
/* Copies from the block of this address fail; NULL: none do. */
void cuda_host_fail(const void *memory);
/* Copies that were asked for so far. */
long cuda_host_copies(void);
/* Where the host reaches the bytes of an address of a device; another address
 * as it is. */
void *cuda_host_reach(const void *memory);
/* Carries out what is on a stream; NULL: on all. */
void cuda_host_flush(CUstream stream);

#endif
