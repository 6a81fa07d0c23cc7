/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the programs that need a GPU. They use nothing but libferry, so
 * that they build wherever it does. A program ends with 0, with 77 when it
 * has nothing to run on, and with 1 at the first check that fails. */
#ifndef FERRY_TESTS_GPU_CHECK_H
#define FERRY_TESTS_GPU_CHECK_H

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>

#define CHECK(expr)                                                            \
    do {                                                                       \
        if (!(expr)) {                                                         \
            printf("FAILED %s:%d: %s: %s\n", __FILE__, __LINE__, #expr,        \
                   ferry_last_error());                                        \
            exit(1);                                                           \
        }                                                                      \
    } while (0)
#define GOOD(expr) CHECK((expr) == FERRY_OK)

/* Runs one case and prints its name and time. */
#define RUN(name)                                                              \
    do {                                                                       \
        int64_t began_ = ferry__now_ns();                                      \
                                                                               \
        name();                                                                \
        printf("ok  %s, %.1f ms\n", #name,                                     \
               (double)(ferry__now_ns() - began_) / 1e6);                      \
        fflush(stdout);                                                        \
    } while (0)

/* Ends the program when the call before says that nothing is here. */
#define NEED(expr)                                                             \
    do {                                                                       \
        if ((expr) < 0) {                                                      \
            printf("skipped: %s\n", ferry_last_error());                       \
            exit(77);                                                          \
        }                                                                      \
    } while (0)

#endif
