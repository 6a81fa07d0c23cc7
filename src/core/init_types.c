/* SPDX-License-Identifier: Apache-2.0 */
/* The init info types of the built-in trainers: constants that programs name
 * without loading a backend. Invariant: the fields here are what the engine
 * reads; there is no other description of them. */
#include <ferry/backend.h>

#define GIB_TEXT "1073741824"

static const ferry_field ipc_fields[] = {
    FERRY_TRAINER_INIT_FIELDS,
    {"packed", FERRY_FIELD_BOOL, 0,
     offsetof(ferry_ipc_trainer_init_info, packed), "false", 0, 0},
    {"packed_buffer_size_bytes", FERRY_FIELD_U64, 0,
     offsetof(ferry_ipc_trainer_init_info, packed_buffer_size_bytes), GIB_TEXT,
     0, 0},
    {"packed_num_buffers", FERRY_FIELD_I32, 0,
     offsetof(ferry_ipc_trainer_init_info, packed_num_buffers), "2", 0, 64},
    {"digest", FERRY_FIELD_BOOL, 0,
     offsetof(ferry_ipc_trainer_init_info, digest), "true", 0, 0},
    {"path", FERRY_FIELD_STR, 0, offsetof(ferry_ipc_trainer_init_info, path),
     NULL, 0, 0},
};

FERRY_TRAINER_INIT_TYPE(ferry_ipc_trainer_init_type, "ipc",
                        ferry_ipc_trainer_init_info, ipc_fields,
                        sizeof(ipc_fields) / sizeof(ipc_fields[0]), NULL);

static const ferry_field nccl_fields[] = {
    FERRY_TRAINER_INIT_FIELDS,
    {"master_address", FERRY_FIELD_STR, 0,
     offsetof(ferry_nccl_trainer_init_info, master_address), NULL, 0, 0},
    {"master_port", FERRY_FIELD_I32, 0,
     offsetof(ferry_nccl_trainer_init_info, master_port), "0", 0, 65535},
    {"world_size", FERRY_FIELD_I32, 0,
     offsetof(ferry_nccl_trainer_init_info, world_size), "0", 0, INT32_MAX},
    {"packed", FERRY_FIELD_BOOL, 0,
     offsetof(ferry_nccl_trainer_init_info, packed), "true", 0, 0},
    {"packed_buffer_size_bytes", FERRY_FIELD_U64, 0,
     offsetof(ferry_nccl_trainer_init_info, packed_buffer_size_bytes), GIB_TEXT,
     0, 0},
    {"packed_num_buffers", FERRY_FIELD_I32, 0,
     offsetof(ferry_nccl_trainer_init_info, packed_num_buffers), "2", 0, 64},
    {"digest", FERRY_FIELD_BOOL, 0,
     offsetof(ferry_nccl_trainer_init_info, digest), "true", 0, 0},
    {"provider", FERRY_FIELD_STR, 0,
     offsetof(ferry_nccl_trainer_init_info, provider), NULL, 0, 0},
    {"rendezvous", FERRY_FIELD_STR, 0,
     offsetof(ferry_nccl_trainer_init_info, rendezvous), NULL, 0, 0},
    {"peers", FERRY_FIELD_STR, 0, offsetof(ferry_nccl_trainer_init_info, peers),
     NULL, 0, 0},
};

FERRY_TRAINER_INIT_TYPE(ferry_nccl_trainer_init_type, "nccl",
                        ferry_nccl_trainer_init_info, nccl_fields,
                        sizeof(nccl_fields) / sizeof(nccl_fields[0]), NULL);
