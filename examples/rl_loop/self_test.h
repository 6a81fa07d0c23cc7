/* SPDX-License-Identifier: Apache-2.0 */
#ifndef RL_LOOP_SELF_TEST_H
#define RL_LOOP_SELF_TEST_H

#include <ferry/ferry.h>

/* Compares a weight of every parameter's gradient with finite differences,
 * and a checkpoint with what comes back from it (in `folder`). FERRY_EINTERNAL
 * names the first that differs. Prints one line each. */
ferry_status self_test(const char *folder);

#endif
