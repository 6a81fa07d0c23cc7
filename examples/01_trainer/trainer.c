/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest complete trainer: "trains" a model of four parameters, then
 * sends them to a running server, three steps in a row.
 *   trainer http://127.0.0.1:8000 [BACKEND]     (../02_server takes it) */
#include <ferry/ferry.h>
#include <stdio.h>

enum { HIDDEN = 8, KV = 4 };

static float q[HIDDEN * HIDDEN], k[KV * HIDDEN], v[KV * HIDDEN], norm[HIDDEN];

static void train(float *weights, int n, int step)
{
    for (int i = 0; i < n; i++)
        weights[i] = (float)(step * 1000 + i);
}

int main(int argc, char **argv)
{
    const char *names[4] = {"q.weight", "k.weight", "v.weight", "norm.weight"};
    const int64_t q_shape[] = {HIDDEN, HIDDEN}, kv_shape[] = {KV, HIDDEN};
    ferry_tensor t[4];
    ferry_source source = {0};
    ferry_client client = {0};
    ferry_trainer *trainer = NULL;
    ferry_status st;

    if (argc < 2)
        return 2;
    ferry_tensor_init(&t[0], q, FERRY_DTYPE_F32, 2, q_shape);
    ferry_tensor_init(&t[1], k, FERRY_DTYPE_F32, 2, kv_shape);
    ferry_tensor_init(&t[2], v, FERRY_DTYPE_F32, 2, kv_shape);
    ferry_tensor_init(&t[3], norm, FERRY_DTYPE_F32, 1, q_shape);
    st = ferry_source_module(names, t, 4, &source);
    if (st == FERRY_OK)
        st = ferry_client_http(argv[1], NULL, &client);
    if (st == FERRY_OK)
        st =
            ferry_trainer_init_dict(argc > 2 ? argv[2] : "ipc", "{\"rank\": 0}",
                                    &client, &source, &trainer);
    for (int step = 1; step <= 3 && st == FERRY_OK; step++) {
        ferry_send_options send = FERRY_SEND_OPTIONS_INIT;
        char version[16];

        for (int i = 0; i < 4; i++)
            train(t[i].data, (int)ferry_tensor_numel(&t[i]), step);
        snprintf(version, sizeof(version), "step-%d", step);
        send.weight_version = version;
        st = ferry_trainer_send_weights(trainer, &send);
    }
    if (st != FERRY_OK)
        fprintf(stderr, "trainer: %s (%s)\n", ferry_last_error(),
                ferry_status_name(st));
    ferry_trainer_shutdown(&trainer);
    ferry_client_close(&client);
    ferry_source_close(&source);
    return st != FERRY_OK;
}
