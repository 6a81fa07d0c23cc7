/* SPDX-License-Identifier: Apache-2.0 */
/* What the rig's two files share. */
#ifndef FERRY_TESTS_HARNESS_IPC_RIG_PRIVATE_H
#define FERRY_TESTS_HARNESS_IPC_RIG_PRIVATE_H

#include "harness/ipc_rig.h"

/* Bytes 8i to 8i + 7 of a parameter, the first in the lowest place. */
uint64_t rig_word(uint64_t seed, size_t param, uint64_t i);
/* Byte i of a parameter, counted over its row-major bytes. */
unsigned char rig_byte(uint64_t seed, size_t param, uint64_t i);
size_t rig_bytes(const rig_param *p);

#endif
