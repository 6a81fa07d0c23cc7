/* SPDX-License-Identifier: Apache-2.0 */
/* Settings of the library and the program: one row each gives the variable,
 * the flag, the JSON key and the documentation. Transfer parameters are not
 * settings: they live in init info alone (D2). No getenv elsewhere. */
#ifndef FERRY_BASE_CONFIG_H
#define FERRY_BASE_CONFIG_H

#include <ferry/status.h>

/* X(id, key, default, unit, help); the variable is FERRY_<KEY in capitals>. */
#define FERRY__CONFIG_TABLE(X)                                                 \
    X(LOG_LEVEL, "log_level", "warn", "error|warn|info|debug",                 \
      "lowest level that is logged")                                           \
    X(LOG_FORMAT, "log_format", "text", "text|json",                           \
      "how log lines are written: plain, or one JSON object each")             \
    X(MODULE_PATH, "module_path", "", "folder",                                \
      "where backends and other modules are; empty: beside libferry")          \
    X(TOKEN, "token", "", "text",                                              \
      "bearer token for servers and clients that are given none")              \
    X(COPY, "copy", "auto", "auto|plain|stream",                               \
      "how large copies store: with or without the cache")                     \
    X(HOST_NAME, "host_name", "", "text",                                      \
      "ranks that give the same name share a host; empty: by machine and "     \
      "network namespace")                                                     \
    X(NCCL_LIBRARY, "nccl_library", "libnccl.so.2", "file",                    \
      "the library that speaks NCCL, such as libferry_nccl_host.so")           \
    X(NCCL_HOST_ADDRESS, "nccl_host_address", "127.0.0.1", "address",          \
      "where libferry_nccl_host's rank 0 is reached by the other ranks")       \
    X(NCCL_HOST_TIMEOUT_MS, "nccl_host_timeout_ms", "300000", "ms",            \
      "bound of every wait of libferry_nccl_host")                             \
    X(CUDA_LIBRARY, "cuda_library", "libcuda.so.1", "file",                    \
      "the CUDA driver, bound when memory of a device is first asked for")     \
    X(FAULT, "fault", "", "text",                                              \
      "what the wrapper of a backend \"fault:NAME\" does wrong")

typedef enum ferry__config_id {
#define FERRY__CONFIG_ENUM(id, key, def, unit, help) FERRY__CONFIG_##id,
    FERRY__CONFIG_TABLE(FERRY__CONFIG_ENUM)
#undef FERRY__CONFIG_ENUM
        FERRY__CONFIG_COUNT
} ferry__config_id;

/* The value: set by the program, else the variable, else the default. */
const char *ferry__config_get(ferry__config_id id);
/* A variable that another library reads (NCCL_CUMEM_ENABLE); NULL: not set. */
const char *ferry__config_foreign(const char *variable);
/* FERRY_EUNKNOWN lists the keys. The value is copied. */
ferry_status ferry__config_set(const char *key, const char *value);

#endif
