/* SPDX-License-Identifier: Apache-2.0 */
/* Golden dicts of the control plane: what a trainer really says at init and
 * in each update, byte by byte, with the session's own words (socket, secret)
 * replaced by X. docs/protocol.md says the same in prose. */
#include "harness/fleet.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "harness/expect.h"

/* A client of four function pointers that writes down what passes. */
typedef struct scribe {
    ferry_worker *worker;
    char text[8192];
} scribe;

/* Appends a line with the values of some keys replaced by X. */
static void note(scribe *s, const char *call, const char *json)
{
    static const char *const keys[] = {"\"socket\":\"", "\"secret\":\""};
    char line[4096];
    size_t n = strlen(s->text);

    snprintf(line, sizeof(line), "%s", json != NULL ? json : "");
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        char *at = strstr(line, keys[i]), *end;

        if (at == NULL)
            continue;
        at += strlen(keys[i]);
        end = strchr(at, '"');
        assert_non_null(end);
        *at++ = 'X';
        memmove(at, end, strlen(end) + 1);
    }
    n += (size_t)snprintf(s->text + n, sizeof(s->text) - n, "%s%s%s\n", call,
                          line[0] ? " " : "", line);
    assert_true(n < sizeof(s->text));
}

static ferry_status scribe_init(void *self, const char *info)
{
    scribe *s = self;

    note(s, "init", info);
    return ferry_worker_init_transfer_engine(s->worker, info);
}

static ferry_status scribe_start(void *self)
{
    scribe *s = self;

    note(s, "start", NULL);
    return ferry_worker_start_weight_update(s->worker);
}

static ferry_status scribe_update(void *self, const char *info)
{
    scribe *s = self;

    note(s, "update", info);
    return ferry_worker_update_weights(s->worker, info);
}

static ferry_status scribe_finish(void *self, const char *version)
{
    scribe *s = self;

    note(s, "finish", version);
    return ferry_worker_finish_weight_update(s->worker, version);
}

/* C2: nothing but the four calls. */
static const ferry_client_ops scribe_ops = {
    .size = offsetof(ferry_client_ops, cancel),
    .kind = "scribe",
    .init_weight_transfer_engine = scribe_init,
    .start_weight_update = scribe_start,
    .update_weights = scribe_update,
    .finish_weight_update = scribe_finish,
};

#define NORM 4
#define HEAD (TOY_VOCAB * TOY_HIDDEN)

/* One round of two parameters whose bytes are at `memory`, the second one
 * stored transposed when `turned`; compares what was said. */
static void says(const char *init, uint16_t *memory, bool turned,
                 const char *golden)
{
    static const char *const names[] = {"model.norm.weight", "lm_head.weight"};
    int64_t norm[] = {NORM}, head[] = {TOY_VOCAB, TOY_HIDDEN};
    int64_t head_turned[] = {TOY_HIDDEN, TOY_VOCAB};
    fleet_options o = {
        .backend = "ipc", .toy = {.kind = TOY_A}, .has_weights = 1};
    ferry_send_options so = FERRY_SEND_OPTIONS_INIT;
    ferry_client client;
    ferry_tensor tensors[2];
    ferry_source source;
    scribe s = {0};
    fleet f;

    if (fleet_unavailable("ipc") != NULL)
        skip();
    for (int i = 0; i < NORM + HEAD; i++)
        memory[i] = (uint16_t)i;
    ok(ferry_tensor_init(&tensors[0], memory, FERRY_DTYPE_BF16, 1, norm));
    ok(ferry_tensor_init(&tensors[1], memory + NORM, FERRY_DTYPE_BF16, 2,
                         turned ? head_turned : head));
    if (turned)
        ok(ferry_tensor_transpose(&tensors[1], 0, 1, &tensors[1]));
    ok(ferry_source_module(names, tensors, 2, &source));
    fleet_open(&f, &o);
    s.worker = f.workers[0];
    client = (ferry_client){&scribe_ops, &s};
    ok(ferry_trainer_init_dict("ipc", init, &client, &source, &f.trainer));
    so.weight_version = "v1";
    ok(ferry_trainer_send_weights(f.trainer, &so));
    if (strcmp(s.text, golden) != 0)
        fail_msg("said:\n%sgolden:\n%s", s.text, golden);
    /* And it was the truth. */
    for (int i = 0; i < HEAD; i++) {
        const uint16_t *got =
            toy_model(f.toys[0])
                ->params[toy_slot(f.toys[0], "lm_head.weight")]
                .data;
        int at = turned ? i % TOY_HIDDEN * TOY_VOCAB + i / TOY_HIDDEN : i;

        assert_int_equal(got[i], NORM + at);
    }
    fleet_close(&f);
    ferry_source_close(&source);
}

static void one_call_through_the_ring(void **state)
{
    uint16_t memory[NORM + HEAD];

    (void)state;
    says("{\"rank\":0,\"deadline_ms\":9000}", memory, false,
         "init {\"packed\":false,"
         "\"packed_buffer_size_bytes\":1073741824,"
         "\"packed_num_buffers\":2,\"transport\":\"ferry\","
         "\"protocol_version\":1,\"socket\":\"X\",\"secret\":\"X\","
         "\"deadline_ms\":9000,\"no_progress_ms\":0,\"digest\":true}\n"
         "start\n"
         "update {\"names\":[\"model.norm.weight\","
         "\"lm_head.weight\"],\"dtype_names\":[\"bfloat16\","
         "\"bfloat16\"],\"shapes\":[[4],[8,4]],"
         "\"handles\":[{\"ring\":true},{\"ring\":true}],\"update\":1}\n"
         "finish v1\n");
}

static void one_call_out_of_shared_memory(void **state)
{
    void *memory;

    (void)state;
    ok(ferry_shared_alloc(2 * (NORM + HEAD), &memory));
    says("{\"rank\":0,\"digest\":false}", memory, true,
         "init {\"packed\":false,"
         "\"packed_buffer_size_bytes\":1073741824,"
         "\"packed_num_buffers\":2,\"transport\":\"ferry\","
         "\"protocol_version\":1,\"socket\":\"X\",\"secret\":\"X\","
         "\"deadline_ms\":0,\"no_progress_ms\":0,\"digest\":false}\n"
         "start\n"
         "update {\"names\":[\"model.norm.weight\","
         "\"lm_head.weight\"],\"dtype_names\":[\"bfloat16\","
         "\"bfloat16\"],\"shapes\":[[4],[8,4]],"
         "\"handles\":[{\"segment\":2,\"offset\":0},{\"segment\":2,"
         "\"offset\":8,\"strides\":[1,8]}],\"update\":1}\n"
         "finish v1\n");
    ferry_shared_free(memory);
}

static void a_call_for_each_chunk(void **state)
{
    uint16_t memory[NORM + HEAD];

    (void)state;
    says("{\"rank\":0,\"packed\":true,\"packed_buffer_size_bytes\":64,"
         "\"packed_num_buffers\":1,\"no_progress_ms\":7000}",
         memory, false,
         "init {\"packed\":true,\"packed_buffer_size_bytes\":64,"
         "\"packed_num_buffers\":1,\"transport\":\"ferry\","
         "\"protocol_version\":1,\"socket\":\"X\",\"secret\":\"X\","
         "\"deadline_ms\":0,\"no_progress_ms\":7000,\"digest\":true}\n"
         "start\n"
         "update {\"names\":[\"model.norm.weight\"],"
         "\"dtype_names\":[\"bfloat16\"],\"shapes\":[[4]],"
         "\"handles\":[{\"segment\":1,\"offset\":0}],\"update\":1}\n"
         "update {\"names\":[\"lm_head.weight\"],"
         "\"dtype_names\":[\"bfloat16\"],\"shapes\":[[8,4]],"
         "\"handles\":[{\"segment\":1,\"offset\":0}],\"update\":2}\n"
         "finish v1\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_call_through_the_ring),
        cmocka_unit_test(one_call_out_of_shared_memory),
        cmocka_unit_test(a_call_for_each_chunk),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
