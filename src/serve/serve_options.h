/* SPDX-License-Identifier: Apache-2.0 */
/* What `ferry serve` was told. Flags are named like vLLM's.
 * Invariant: options that were read without error are consistent; nothing
 * was opened yet. */
#ifndef FERRY_SERVE_SERVE_OPTIONS_H
#define FERRY_SERVE_SERVE_OPTIONS_H

#include <ferry/worker.h>

typedef enum ferry__load_format {
    FERRY__LOAD_AUTO,
    FERRY__LOAD_DUMMY,
    FERRY__LOAD_SAFETENSORS,
    FERRY__LOAD_GGUF
} ferry__load_format;

typedef struct ferry__serve_options {
    const char *model;       /* path; borrowed from argv */
    const char *served_name; /* for /v1/models */
    const char *host;        /* 127.0.0.1 */
    int32_t port;            /* 0 picks one */
    const char *port_file;   /* NULL, or where the port is written */
    const char *api_key;     /* NULL: no token */
    const char *weight_key;  /* token of the weight routes; NULL: api_key */
    const char *tls_cert, *tls_key; /* PEM files; NULL: plain HTTP */
    int64_t request_timeout_ms;     /* for a request to arrive */
    int32_t per_address;            /* connections of one address */
    const char *join;               /* NULL, or the server to copy from */
    const char *join_key, *join_ca; /* its token and CA; may be NULL */
    char *backend;                  /* owned; NULL: no weight routes */
    char *bare_host; /* owned; `host` where it came in brackets, else NULL */
    ferry__load_format load_format;
    ferry_dtype kernel;
    ferry_commit commit;
    int32_t tp_size, dp_size;
    int32_t max_seqs, max_len, threads; /* threads 0: share the cores */
    bool serve_unsynced;                /* random weights may be served */
    bool require_full;
    int32_t defer_threads; /* of a rank; 0: quantise while loading */
    uint64_t seed;         /* of dummy weights */
    int64_t deadline_ms, no_progress_ms; /* 0: the worker's defaults */
    int64_t max_body_bytes;
    bool help;
} ferry__serve_options;

/* Reads argv (argv[0] is "serve"). FERRY_EINVAL names the flag and what it
 * takes. */
ferry_status ferry__serve_options_read(int argc, char **argv,
                                       ferry__serve_options *out);
void ferry__serve_options_free(ferry__serve_options *options);
/* "f32", "bf16" or "q8_0", as --kernel-format takes it. */
const char *ferry__kernel_name(ferry_dtype kernel);
/* The flags with their defaults, one a line. */
const char *ferry__serve_usage(void);

/* Serves until SIGTERM or SIGINT. Prints the address on standard output.
 * Call it in a process that has no other threads yet: it forks the ranks.
 * Returns the exit status of the program. */
int ferry__serve_main(int argc, char **argv);

#endif
