/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time and deadlines. Invariant: a deadline never moves once set. */
#ifndef FERRY_BASE_CLOCK_H
#define FERRY_BASE_CLOCK_H

#include <ferry/status.h>
#include <stdbool.h>
#include <time.h>

int64_t ferry__now_ns(void);

typedef struct ferry__deadline {
    int64_t at_ns;    /* monotonic */
    int64_t bound_ms; /* as armed, for messages */
} ferry__deadline;
ferry__deadline ferry__deadline_in(int64_t ms);
/* Milliseconds left, 0 when passed, rounded up otherwise. */
int64_t ferry__deadline_left_ms(const ferry__deadline *d);
bool ferry__deadline_passed(const ferry__deadline *d);
void ferry__sleep_ms(int64_t ms);
struct timespec ferry__timespec_at(int64_t at_ns);

#endif
