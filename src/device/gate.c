/* SPDX-License-Identifier: Apache-2.0 */
/* Gates on futexes. The sleeper counts itself before it looks again, and the
 * raiser looks at that count after its store, both in one total order: a
 * wake-up cannot fall between the two. A sleeper that was killed leaves its
 * count behind, which only costs wake calls. */
#include "device/gate.h"

#include "base/clock.h"
#include "base/thread.h"

#define SPIN_NS        15000
#define SPINS_PER_LOOK 24

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

uint32_t ferry__gate_value(const ferry__gate *gate)
{
    return atomic_load_explicit(&gate->value, memory_order_acquire);
}

bool ferry__gate_reached(const ferry__gate *gate, uint32_t want)
{
    return (int32_t)(ferry__gate_value(gate) - want) >= 0;
}

bool ferry__gate_await(ferry__gate *gate, uint32_t want, int64_t slice_ms)
{
    int64_t until;
    uint32_t seen;

    if (ferry__gate_reached(gate, want))
        return true;
    until = ferry__now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            relax();
            if (ferry__gate_reached(gate, want))
                return true;
        }
    } while (ferry__now_ns() < until);

    atomic_fetch_add(&gate->sleepers, 1);
    seen = atomic_load(&gate->value);
    if ((int32_t)(seen - want) < 0)
        ferry__futex_wait(&gate->value, seen, slice_ms);
    atomic_fetch_sub(&gate->sleepers, 1);
    return ferry__gate_reached(gate, want);
}

void ferry__gate_raise(ferry__gate *gate, uint32_t value)
{
    atomic_store(&gate->value, value);
    if (atomic_load(&gate->sleepers) != 0)
        ferry__futex_wake_all(&gate->value);
}

void ferry__gate_wake(ferry__gate *gate)
{
    ferry__futex_wake_all(&gate->value);
}
