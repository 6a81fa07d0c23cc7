/* SPDX-License-Identifier: Apache-2.0 */
/* A counter in shared memory that one side raises and others wait for.
 * Waiting spins for some microseconds and then sleeps in the kernel, so that
 * more ranks than cores do not starve each other; raising costs no system
 * call while nobody sleeps.
 * Invariant: only one thread raises a gate, and only upwards; values wrap. */
#ifndef FERRY_DEVICE_GATE_H
#define FERRY_DEVICE_GATE_H

#include <ferry/status.h>
#include <stdatomic.h>
#include <stdbool.h>

/* One cache line. All zeros is a gate at 0. */
typedef struct ferry__gate {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} ferry__gate;

uint32_t ferry__gate_value(const ferry__gate *gate);
bool ferry__gate_reached(const ferry__gate *gate, uint32_t want);
/* Waits until the gate has reached `want`, at most about slice_ms; false when
 * it has not yet. May return early. */
bool ferry__gate_await(ferry__gate *gate, uint32_t want, int64_t slice_ms);
void ferry__gate_raise(ferry__gate *gate, uint32_t value);
/* Makes all sleepers look again. */
void ferry__gate_wake(ferry__gate *gate);

#endif
