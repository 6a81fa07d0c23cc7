/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time and deadlines. Invariant: a deadline never moves once set,
 * and one that is too far away to count ends at INT64_MAX. */
#include "base/clock.h"

#include <errno.h>

#define NS_PER_MS INT64_C(1000000)
#define NS_PER_S  INT64_C(1000000000)

int64_t ferry__now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

static int64_t after_ms(int64_t ms)
{
    int64_t now = ferry__now_ns();

    if (ms < 0)
        ms = 0;
    if (ms > (INT64_MAX - now) / NS_PER_MS)
        return INT64_MAX;
    return now + ms * NS_PER_MS;
}

ferry__deadline ferry__deadline_in(int64_t ms)
{
    return (ferry__deadline){after_ms(ms), ms};
}

int64_t ferry__deadline_left_ms(const ferry__deadline *d)
{
    int64_t left = d->at_ns - ferry__now_ns();

    if (left <= 0)
        return 0;
    return left / NS_PER_MS + (left % NS_PER_MS != 0);
}

bool ferry__deadline_passed(const ferry__deadline *d)
{
    return ferry__now_ns() >= d->at_ns;
}

struct timespec ferry__timespec_at(int64_t at_ns)
{
    struct timespec t;

    t.tv_sec = (time_t)(at_ns / NS_PER_S);
    t.tv_nsec = (long)(at_ns % NS_PER_S);
    return t;
}

void ferry__sleep_ms(int64_t ms)
{
    struct timespec until = ferry__timespec_at(after_ms(ms));

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) ==
           EINTR)
        continue;
}
