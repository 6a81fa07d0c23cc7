/* SPDX-License-Identifier: Apache-2.0 */
/* Ferry carries model weights from a trainer into running inference workers.
 *
 * Four abstractions, each replaceable on its own:
 *   ferry_source   what goes out            (source.h)
 *   ferry_client   how the servers are reached: four calls   (client.h)
 *   ferry_trainer  how the bytes leave      (trainer.h)
 *   ferry_worker   how they arrive and land (worker.h, model.h)
 * Engines are picked by name from two factories (registry.h); to write your
 * own, see backend.h. Every function that can fail returns ferry_status and
 * records one line for ferry_last_error() (status.h).
 *
 * A complete trainer:
 *
 *   #include <ferry/ferry.h>
 *   #include <stdio.h>
 *
 *   int main(void)
 *   {
 *       float w[4] = {1, 2, 3, 4};
 *       int64_t shape[1] = {4};
 *       const char *name = "model.norm.weight";
 *       ferry_tensor t;
 *       ferry_source source = {0};
 *       ferry_client client = {0};
 *       ferry_trainer *trainer = NULL;
 *       ferry_ipc_trainer_init_info info = FERRY_IPC_TRAINER_INIT_INFO(0);
 *       ferry_send_options send = FERRY_SEND_OPTIONS_INIT;
 *       ferry_status st;
 *
 *       ferry_tensor_init(&t, w, FERRY_DTYPE_F32, 1, shape);
 *       st = ferry_source_module(&name, &t, 1, &source);
 *       if (st == 0)
 *           st = ferry_client_http("http://127.0.0.1:8000", NULL, &client);
 *       if (st == 0)
 *           st = ferry_trainer_init(&info.base, &client, &source, &trainer);
 *       send.weight_version = "step-1";
 *       if (st == 0)
 *           st = ferry_trainer_send_weights(trainer, &send);
 *       if (st != 0)
 *           fprintf(stderr, "%s: %s\n", ferry_status_name(st),
 *                   ferry_last_error());
 *       ferry_trainer_shutdown(&trainer);
 *       ferry_client_close(&client);
 *       ferry_source_close(&source);
 *       return st != 0;
 *   }
 */
#ifndef FERRY_FERRY_H
#define FERRY_FERRY_H

#include <ferry/client.h>
#include <ferry/model.h>
#include <ferry/registry.h>
#include <ferry/source.h>
#include <ferry/status.h>
#include <ferry/tensor.h>
#include <ferry/trainer.h>
#include <ferry/worker.h>

#endif
