/* SPDX-License-Identifier: Apache-2.0 */
/* Every public function refuses a NULL that it cannot work with and names the
 * argument, or does nothing where it has no status to answer. One row a NULL;
 * all other arguments of a row are good. Under the sanitizers too. */
#include "harness/solo.h"
#include <ferry/backend.h>
#include <ferry/ferry.h>

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void row(int line, ferry_status st, const char *words)
{
    if (st != FERRY_EINVAL || strstr(ferry_last_error(), words) == NULL)
        fail_msg("line %d: %s: \"%s\", want \"%s\"", line,
                 ferry_status_name(st), ferry_last_error(), words);
}
#define SAYS(words, call) row(__LINE__, (call), (words))
#define NEEDS(arg, call)  SAYS(arg " is NULL", call)

static float storage[4];
static const int64_t four = 4;

static ferry_tensor good_tensor(void)
{
    ferry_tensor t;

    assert_int_equal(ferry_tensor_init(&t, storage, FERRY_DTYPE_F32, 1, &four),
                     FERRY_OK);
    return t;
}

/* ---- tensor.h ---- */

static void tensors(void **state)
{
    ferry_tensor t = good_tensor(), out;
    const int32_t zero = 0;
    ferry_dtype dtype;

    (void)state;
    NEEDS("name", ferry_dtype_parse(NULL, &dtype));
    NEEDS("out_dtype", ferry_dtype_parse("float32", NULL));
    NEEDS("out", ferry_tensor_init(NULL, storage, FERRY_DTYPE_F32, 1, &four));
    NEEDS("shape", ferry_tensor_init(&out, storage, FERRY_DTYPE_F32, 1, NULL));
    assert_int_equal(ferry_tensor_init(&out, storage, FERRY_DTYPE_F32, 0, NULL),
                     FERRY_OK);
    NEEDS("t", ferry_tensor_narrow(NULL, 0, 0, 1, &out));
    NEEDS("out", ferry_tensor_narrow(&t, 0, 0, 1, NULL));
    NEEDS("t", ferry_tensor_select(NULL, 0, 0, &out));
    NEEDS("out", ferry_tensor_select(&t, 0, 0, NULL));
    NEEDS("t", ferry_tensor_transpose(NULL, 0, 0, &out));
    NEEDS("out", ferry_tensor_transpose(&t, 0, 0, NULL));
    NEEDS("t", ferry_tensor_permute(NULL, &zero, &out));
    NEEDS("dims", ferry_tensor_permute(&t, NULL, &out));
    NEEDS("out", ferry_tensor_permute(&t, &zero, NULL));
    NEEDS("t", ferry_tensor_chunk(NULL, 2, 0, 0, &out));
    NEEDS("out", ferry_tensor_chunk(&t, 2, 0, 0, NULL));
    NEEDS("t", ferry_tensor_view(NULL, 1, &four, &out));
    NEEDS("shape", ferry_tensor_view(&t, 1, NULL, &out));
    NEEDS("out", ferry_tensor_view(&t, 1, &four, NULL));
    NEEDS("t", ferry_tensor_flatten(NULL, 0, 0, &out));
    NEEDS("out", ferry_tensor_flatten(&t, 0, 0, NULL));
    NEEDS("t", ferry_tensor_unsqueeze(NULL, 0, &out));
    NEEDS("out", ferry_tensor_unsqueeze(&t, 0, NULL));
    NEEDS("t", ferry_tensor_squeeze(NULL, 0, &out));
    NEEDS("out", ferry_tensor_squeeze(&t, 0, NULL));
    NEEDS("dst", ferry_tensor_copy(NULL, &t));
    NEEDS("src", ferry_tensor_copy(&t, NULL));
    NEEDS("out_memory", ferry_shared_alloc(1, NULL));
    assert_int_equal(ferry_tensor_numel(NULL), 0);
    assert_int_equal(ferry_tensor_bytes(NULL), 0);
    assert_false(ferry_tensor_is_contiguous(NULL));
    assert_null(ferry_tensor_data(NULL));
    ferry_shared_free(NULL);
    ferry_free(NULL);
    ferry_log_set(NULL, NULL);
}

/* ---- source.h ---- */

static const char *const names[] = {"w"};

static void sources(void **state)
{
    ferry_tensor t = good_tensor();
    ferry_source s = {0}, cleared = {0}, out = {0};

    (void)state;
    NEEDS("out_source", ferry_source_module(names, &t, 1, NULL));
    SAYS("NULL", ferry_source_module(NULL, &t, 1, &out));
    SAYS("NULL", ferry_source_module(names, NULL, 1, &out));
    NEEDS("path", ferry_source_safetensors(NULL, &out));
    NEEDS("out_source", ferry_source_safetensors("x.safetensors", NULL));
    NEEDS("path", ferry_source_gguf(NULL, &out));
    NEEDS("out_source", ferry_source_gguf("x.gguf", NULL));
    NEEDS("path", ferry_source_open(NULL, &out));
    NEEDS("out_source", ferry_source_open("x.gguf", NULL));
    assert_int_equal(ferry_source_module(names, &t, 1, &s), FERRY_OK);
    NEEDS("out_source", ferry_source_rename(&s, names, names, 1, NULL));
    SAYS("NULL", ferry_source_rename(&s, NULL, names, 1, &out));
    SAYS("NULL", ferry_source_rename(&s, names, NULL, 1, &out));
    NEEDS("out_source", ferry_source_cast(&s, FERRY_DTYPE_F16, NULL, NULL));
    NEEDS("out_source", ferry_source_filter(&s, names, 1, 1, NULL));
    SAYS("NULL", ferry_source_filter(&s, NULL, 1, 1, &out));
    NEEDS("out_source", ferry_source_reorder(&s, NULL));
    NEEDS("out_source", ferry_source_split(&s, "w", 0, names, &four, 1, NULL));
    SAYS("NULL", ferry_source_split(&s, NULL, 0, names, &four, 1, &out));
    SAYS("parts", ferry_source_split(&s, "w", 0, NULL, &four, 1, &out));
    SAYS("parts", ferry_source_split(&s, "w", 0, names, NULL, 1, &out));
    NEEDS("out_source", ferry_source_fuse(&s, "w", 0, names, 1, NULL));
    SAYS("NULL", ferry_source_fuse(&s, NULL, 0, names, 1, &out));
    SAYS("parts", ferry_source_fuse(&s, "w", 0, NULL, 1, &out));
    NEEDS("out_source",
          ferry_source_dequantise(&s, "_s", FERRY_DTYPE_F32, NULL));
    SAYS("suffix", ferry_source_dequantise(&s, NULL, FERRY_DTYPE_F32, &out));
    /* An inner source that is NULL, or was taken by another adapter. */
    for (int i = 0; i < 2; i++) {
        ferry_source *in = i == 0 ? NULL : &cleared;

        SAYS("no source", ferry_source_rename(in, names, names, 1, &out));
        SAYS("no source", ferry_source_cast(in, FERRY_DTYPE_F16, NULL, &out));
        SAYS("no source", ferry_source_filter(in, names, 1, 1, &out));
        SAYS("no source", ferry_source_reorder(in, &out));
        SAYS("no source",
             ferry_source_split(in, "w", 0, names, &four, 1, &out));
        SAYS("no source", ferry_source_fuse(in, "w", 0, names, 1, &out));
        SAYS("no source",
             ferry_source_dequantise(in, "_s", FERRY_DTYPE_F32, &out));
    }
    assert_null(out.ops);
    ferry_source_close(&s);
    ferry_source_close(&cleared);
    ferry_source_close(NULL);
}

/* ---- worker.h and model.h ---- */

static void no_bytes(void *arg, const char *name, const void *bytes,
                     size_t size_bytes)
{
    (void)arg, (void)name, (void)bytes, (void)size_bytes;
}

static void workers(void **state)
{
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT("probe");
    toy_options kind = {.kind = TOY_A};
    ferry_source cleared = {0};
    char text[64] = "x", *json;
    ferry_model model = {0};
    ferry_worker *w;
    solo r;

    (void)state;
    solo_open(&r, &o, &kind);
    NEEDS("options", ferry_worker_create(NULL, &model, NULL, &w));
    NEEDS("model", ferry_worker_create(&o, NULL, NULL, &w));
    NEEDS("out_worker", ferry_worker_create(&o, &model, NULL, NULL));
    NEEDS("worker", ferry_worker_init_transfer_engine(NULL, "{}"));
    NEEDS("init_info", ferry_worker_init_transfer_engine(r.worker, NULL));
    NEEDS("worker", ferry_worker_start_weight_update(NULL));
    NEEDS("worker", ferry_worker_start_draft_weight_update(NULL));
    NEEDS("worker", ferry_worker_update_weights(NULL, "{}"));
    NEEDS("worker", ferry_worker_finish_weight_update(NULL, NULL));
    NEEDS("worker", ferry_worker_prepare_weight_update(NULL));
    NEEDS("worker", ferry_worker_commit_weight_update(NULL, NULL));
    NEEDS("worker", ferry_worker_shutdown_transfer_engine(NULL));
    NEEDS("worker", ferry_worker_drain_pending(NULL));
    NEEDS("worker", ferry_worker_set_weight_version(NULL, "v"));
    NEEDS("weight_version", ferry_worker_set_weight_version(r.worker, NULL));
    NEEDS("worker", ferry_worker_may_serve(NULL));
    NEEDS("worker", ferry_worker_plan(NULL, NULL, 0, &json));
    NEEDS("params", ferry_worker_plan(r.worker, NULL, 1, &json));
    NEEDS("out_json", ferry_worker_plan(r.worker, NULL, 0, NULL));
    NEEDS("worker", ferry_worker_each_param(NULL, no_bytes, NULL));
    NEEDS("fn", ferry_worker_each_param(r.worker, NULL, NULL));
    NEEDS("worker", ferry_worker_load_source(NULL, &cleared));
    NEEDS("source", ferry_worker_load_source(r.worker, NULL));
    SAYS("source", ferry_worker_load_source(r.worker, &cleared));
    assert_int_equal(ferry_worker_init_transfer_engine(r.worker, "{}"),
                     FERRY_OK);
    assert_int_equal(ferry_worker_start_weight_update(r.worker), FERRY_OK);
    NEEDS("update info", ferry_worker_update_weights(r.worker, NULL));
    ferry_worker_abort_weight_update(NULL);
    ferry_worker_require_sync(NULL);
    ferry_worker_destroy(NULL);
    assert_false(ferry_worker_defers_processing(NULL));
    assert_int_equal(ferry_worker_status(NULL, text, sizeof(text)), 0);
    assert_string_equal(text, "");
    assert_int_equal(ferry_worker_status(NULL, NULL, 0), 0);
    solo_close(&r);
}

static ferry_status no_step(void *arg, const ferry_tensor *dst,
                            const ferry_tensor *inputs, int32_t n_inputs)
{
    (void)arg, (void)dst, (void)inputs, (void)n_inputs;
    return FERRY_OK;
}

static ferry_status no_room(void *arg, const ferry_tensor *tensor,
                            void **out_bytes)
{
    (void)arg, (void)tensor, (void)out_bytes;
    return FERRY_ENOMEM;
}

static ferry_status load_with_nulls(void *self, ferry_loader *loader,
                                    const char *name, const ferry_tensor *t)
{
    const ferry_step step = {"step", no_step, NULL, 1};
    ferry_tensor slot;

    (void)self, (void)name;
    NEEDS("loader", ferry_loader_slot(NULL, 0, &slot));
    NEEDS("out_slot", ferry_loader_slot(loader, 0, NULL));
    assert_int_equal(ferry_loader_slot(loader, 0, &slot), FERRY_OK);
    NEEDS("loader", ferry_loader_expect(NULL, t, 1, &four));
    NEEDS("tensor", ferry_loader_expect(loader, NULL, 1, &four));
    NEEDS("shape", ferry_loader_expect(loader, t, 1, NULL));
    NEEDS("loader", ferry_load_copy(NULL, &slot, t));
    NEEDS("dst", ferry_load_copy(loader, NULL, t));
    NEEDS("src", ferry_load_copy(loader, &slot, NULL));
    NEEDS("loader", ferry_load_tied(NULL, &slot, t));
    NEEDS("dst", ferry_load_tied(loader, NULL, t));
    NEEDS("src", ferry_load_tied(loader, &slot, NULL));
    NEEDS("loader", ferry_load_step(NULL, &step, &slot, 0, t));
    NEEDS("step", ferry_load_step(loader, NULL, &slot, 0, t));
    NEEDS("dst", ferry_load_step(loader, &step, NULL, 0, t));
    NEEDS("src", ferry_load_step(loader, &step, &slot, 0, NULL));
    NEEDS("loader", ferry_load_aside(NULL, no_room, NULL, t));
    NEEDS("room", ferry_load_aside(loader, NULL, NULL, t));
    NEEDS("src", ferry_load_aside(loader, no_room, NULL, NULL));
    return FERRY_OK;
}

/* A loader that passes a NULL fails, even one that ignores the answer. */
static void loaders(void **state)
{
    const ferry_param param = {"w", FERRY_DTYPE_F32, 1, {4}, storage, 0, 0, 0};
    const ferry_param_meta meta = {"w", FERRY_DTYPE_F32, 1, {4}};
    ferry_worker_options o = FERRY_WORKER_OPTIONS_INIT(NULL);
    ferry_model model = {.size = sizeof(model), .name = "nulls"};
    ferry_worker *w;
    char *json;

    (void)state;
    model.params = &param;
    model.n_params = 1;
    model.load = load_with_nulls;
    assert_int_equal(ferry_worker_create(&o, &model, NULL, &w), FERRY_OK);
    NEEDS("out_slot", ferry_worker_plan(w, &meta, 1, &json));
    ferry_worker_destroy(&w);
}

/* ---- client.h, trainer.h, registry.h, backend.h ---- */

static void clients(void **state)
{
    ferry_client one = {0}, out = {0};

    (void)state;
    SAYS("base_url", ferry_client_http(NULL, NULL, &out));
    NEEDS("out_client", ferry_client_http("http://127.0.0.1:1", NULL, NULL));
    NEEDS("worker", ferry_client_local(NULL, &out));
    NEEDS("out_client", ferry_client_local((struct ferry_worker *)&one, NULL));
    SAYS("client", ferry_client_fanout(NULL, 1, &out));
    SAYS("client 0", ferry_client_fanout(&one, 1, &out));
    NEEDS("out_client", ferry_client_fanout(&one, 1, NULL));
    assert_null(out.ops);
    ferry_client_close(&one);
    ferry_client_close(NULL);
}

static void http_options_of_a_newer_program_are_cut(void **state)
{
    struct {
        ferry_http_options known;
        char more[32];
    } o = {FERRY_HTTP_OPTIONS_INIT, "beyond"};
    ferry_client client;

    (void)state;
    o.known.size = sizeof(o);
    assert_int_equal(ferry_client_http("http://127.0.0.1:1", &o.known, &client),
                     FERRY_OK);
    ferry_client_close(&client);
}

static void trainers(void **state)
{
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    ferry_client client = {0};
    ferry_trainer *t = NULL;

    (void)state;
    NEEDS("info", ferry_trainer_init(NULL, &client, NULL, &t));
    NEEDS("out_trainer", ferry_trainer_init(&info.base, &client, NULL, NULL));
    NEEDS("client", ferry_trainer_init(&info.base, NULL, NULL, &t));
    NEEDS("backend", ferry_trainer_init_dict(NULL, "{}", &client, NULL, &t));
    NEEDS("init_info", ferry_trainer_init_dict("ipc", NULL, &client, NULL, &t));
    NEEDS("out_trainer",
          ferry_trainer_init_dict("ipc", "{}", &client, NULL, NULL));
    NEEDS("trainer", ferry_trainer_send_weights(NULL, NULL));
    ferry_trainer_cancel(NULL);
    ferry_trainer_shutdown(NULL);
    ferry_trainer_shutdown(&t);
    info.base.reserved = 1;
    SAYS("reserved is 1", ferry_trainer_init(&info.base, &client, NULL, &t));
    assert_null(t);
}

static void registries(void **state)
{
    const struct ferry_trainer_engine_ops *trainer;
    const struct ferry_worker_engine_ops *worker;

    (void)state;
    SAYS("name", ferry_trainer_register(NULL, NULL));
    SAYS("table", ferry_trainer_register("x", NULL));
    SAYS("name", ferry_worker_register(NULL, NULL));
    SAYS("table", ferry_worker_register("x", NULL));
    SAYS("name", ferry_trainer_register_lazy(NULL, "x.so", NULL));
    SAYS("library", ferry_trainer_register_lazy("x", NULL, NULL));
    SAYS("name", ferry_worker_register_lazy(NULL, "x.so", NULL));
    SAYS("library", ferry_worker_register_lazy("x", NULL, NULL));
    SAYS("name", ferry_trainer_find(NULL, &trainer));
    NEEDS("out", ferry_trainer_find("ipc", NULL));
    SAYS("name", ferry_worker_find(NULL, &worker));
    NEEDS("out", ferry_worker_find("ipc", NULL));
    NEEDS("out", ferry_trainer_list(0, NULL));
    NEEDS("out", ferry_worker_list(0, NULL));
}

static void infos(void **state)
{
    const ferry_info_type *type = &ferry_ipc_trainer_init_type.info;
    ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
    void *parsed;
    char *json;

    (void)state;
    NEEDS("type", ferry_info_parse(NULL, "{}", &parsed));
    SAYS("no text", ferry_info_parse(type, NULL, &parsed));
    NEEDS("out_info", ferry_info_parse(type, "{\"rank\":0}", NULL));
    NEEDS("type", ferry_info_format(NULL, &info, &json));
    NEEDS("info", ferry_info_format(type, NULL, &json));
    NEEDS("out_json", ferry_info_format(type, &info, NULL));
    ferry_info_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors),
        cmocka_unit_test(sources),
        cmocka_unit_test(workers),
        cmocka_unit_test(loaders),
        cmocka_unit_test(clients),
        cmocka_unit_test(http_options_of_a_newer_program_are_cut),
        cmocka_unit_test(trainers),
        cmocka_unit_test(registries),
        cmocka_unit_test(infos),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
