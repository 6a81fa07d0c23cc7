/* SPDX-License-Identifier: Apache-2.0 */
/* An engine of one's own, on both sides: registered by library and symbol,
 * loaded when it is first asked for, chosen by name. Trainer and worker are
 * in one process here, joined by the local client.
 *   custom_engine FILE_TRAINER.so FILE_WORKER.so SCRATCH_FILE */
#include <ferry/ferry.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float stored[2][3]; /* the worker's: "gate" and "up", fused */

static ferry_status load(void *self, ferry_loader *loader, const char *name,
                         const ferry_tensor *tensor)
{
    ferry_tensor slot;
    int64_t row = strcmp(name, "up") == 0;

    (void)self;
    if (row == 0 && strcmp(name, "gate") != 0)
        return ferry_fail(FERRY_EUNKNOWN, "unknown parameter %s", name);
    FERRY_TRY(ferry_loader_slot(loader, 0, &slot));
    FERRY_TRY(ferry_tensor_narrow(&slot, 0, row, 1, &slot));
    FERRY_TRY(ferry_loader_expect(loader, tensor, 2, slot.shape));
    return ferry_load_copy(loader, &slot, tensor);
}

static const ferry_param param = {.name = "gate_up",
                                  .dtype = FERRY_DTYPE_F32,
                                  .ndim = 2,
                                  .shape = {2, 3},
                                  .data = stored};
static const ferry_model model = {.size = sizeof(model),
                                  .name = "fused",
                                  .params = &param,
                                  .n_params = 1,
                                  .load = load};

/* One round from a trainer's two tensors into the worker's one. */
static ferry_status one_round(ferry_worker *worker, const char *init_info)
{
    static float gate[3] = {1, 2, 3}, up[3] = {4, 5, 6};
    const char *names[2] = {"gate", "up"};
    const int64_t shape[2] = {1, 3};
    ferry_send_options send = FERRY_SEND_OPTIONS_INIT;
    ferry_tensor tensors[2];
    ferry_source source = {0};
    ferry_client client = {0};
    ferry_trainer *trainer = NULL;
    ferry_status st;

    ferry_tensor_init(&tensors[0], gate, FERRY_DTYPE_F32, 2, shape);
    ferry_tensor_init(&tensors[1], up, FERRY_DTYPE_F32, 2, shape);
    send.weight_version = "first";
    st = ferry_source_module(names, tensors, 2, &source);
    if (st == FERRY_OK)
        st = ferry_client_local(worker, &client);
    if (st == FERRY_OK)
        st = ferry_trainer_init_dict("file", init_info, &client, &source,
                                     &trainer);
    if (st == FERRY_OK)
        st = ferry_trainer_send_weights(trainer, &send);
    ferry_trainer_shutdown(&trainer);
    ferry_client_close(&client);
    ferry_source_close(&source);
    return st;
}

static ferry_status run(char **argv)
{
    ferry_worker_options options = FERRY_WORKER_OPTIONS_INIT("file");
    ferry_worker *worker = NULL;
    json_t *info = json_pack("{s:i, s:s}", "rank", 0, "path", argv[3]);
    char *init_info = json_dumps(info, JSON_COMPACT);
    ferry_status st;

    st = ferry_trainer_register_lazy("file", argv[1], "file_trainer_engine");
    if (st == FERRY_OK)
        st = ferry_worker_register_lazy("file", argv[2], "file_worker_engine");
    if (st == FERRY_OK)
        st = ferry_worker_create(&options, &model, NULL, &worker);
    if (st == FERRY_OK)
        st = one_round(worker, init_info);
    ferry_worker_destroy(&worker);
    free(init_info);
    json_decref(info);
    return st;
}

int main(int argc, char **argv)
{
    ferry_status st;

    if (argc != 4) {
        fprintf(stderr, "usage: custom_engine TRAINER.so WORKER.so FILE\n");
        return 2;
    }
    st = run(argv);
    if (st != FERRY_OK) {
        fprintf(stderr, "custom_engine: %s (%s)\n", ferry_last_error(),
                ferry_status_name(st));
        return 1;
    }
    for (int i = 0; i < 6; i++)
        printf("%g%s", stored[i / 3][i % 3], i == 5 ? "\n" : " ");
    return 0;
}
