/* SPDX-License-Identifier: Apache-2.0 */
/* One weight call at a time: who is refused and who waits.
 * ctest: link=worker */
#include "serve/rank_call.h"

#include "base/clock.h"
#include "base/thread.h"

#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static ferry__server server;
static sem_t held;

/* Holds `control` for a moment without a name, as the reaper does. */
static void *look_around(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&server.control);
    sem_post(&held);
    ferry__sleep_ms(100);
    pthread_mutex_unlock(&server.control);
    return NULL;
}

static int open_server(void **state)
{
    (void)state;
    pthread_mutex_init(&server.control, NULL);
    pthread_mutex_init(&server.lock, NULL);
    return sem_init(&held, 0, 0);
}

static void h2_a_call_waits_for_a_look_at_the_round(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        pthread_t thread;

        assert_int_equal(
            ferry__thread_start(&thread, "look", look_around, NULL), FERRY_OK);
        sem_wait(&held);
        assert_int_equal(i == 0 ? ferry__rank_call_begin(&server, "join")
                                : ferry__rank_ask_begin(&server, "plan"),
                         FERRY_OK);
        ferry__rank_call_end(&server);
        pthread_join(thread, NULL);
    }
}

static void h2_a_call_beside_a_call_is_refused_by_name(void **state)
{
    (void)state;
    assert_int_equal(ferry__rank_call_begin(&server, "join"), FERRY_OK);
    assert_int_equal(ferry__rank_call_begin(&server, "finish"), FERRY_EBUSY);
    assert_string_equal(ferry_last_error(), "finish refused: join is running");
    ferry__rank_call_end(&server);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(h2_a_call_waits_for_a_look_at_the_round),
        cmocka_unit_test(h2_a_call_beside_a_call_is_refused_by_name),
    };

    return cmocka_run_group_tests(tests, open_server, NULL);
}
