/* SPDX-License-Identifier: Apache-2.0 */
/* Turns NCCL's unique id into its forms and back, for tests in other
 * languages, and is one rank of a group of libferry_nccl_host. Bytes are hex.
 *   nccl_driver_main pickle|base64 ID     the form of an id
 *   nccl_driver_main unpickle BYTES       the id in a pickle
 *   nccl_driver_main unbase64 TEXT        the id in a text
 *   nccl_driver_main rank RANK WORLD FILE a sum and a broadcast; rank 0 puts
 *                                         the id into the file, under a name
 *                                         of its own until it is whole
 * A failure prints its line and ends with 1. */
#include "comm/unique_id.h"

#include "base/clock.h"
#include "harness/nccl_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t read_hex(const char *text, unsigned char *out, size_t most)
{
    size_t n = 0;

    for (; text[0] && text[1] && n < most; text += 2) {
        char digits[3] = {text[0], text[1], '\0'};

        out[n++] = (unsigned char)strtoul(digits, NULL, 16);
    }
    return n;
}

static int print_hex(const unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        printf("%02x", bytes[i]);
    printf("\n");
    return 0;
}

static int failed(void)
{
    printf("%s\n", ferry_last_error());
    return 1;
}

/* ---- a rank ---- */

#define BYTES   ((size_t)4 << 20)
#define WAIT_MS 20000

static bool put_id(const char *path, const ncclUniqueId *id)
{
    char part[4096];
    FILE *f;
    bool good;

    snprintf(part, sizeof(part), "%s.part", path);
    f = fopen(part, "wb");
    good = f && fwrite(id, sizeof(*id), 1, f) == 1;
    if (f)
        good = fclose(f) == 0 && good;
    return good && rename(part, path) == 0;
}

static bool get_id(const char *path, ncclUniqueId *out)
{
    ferry__deadline until = ferry__deadline_in(WAIT_MS);
    bool good;
    FILE *f;

    while ((f = fopen(path, "rb")) == NULL && !ferry__deadline_passed(&until))
        ferry__sleep_ms(10);
    good = f && fread(out, sizeof(*out), 1, f) == 1;
    if (f)
        fclose(f);
    return good;
}

#define GOOD(expr)                                                             \
    do {                                                                       \
        if ((expr) != ncclSuccess) {                                           \
            printf("rank %d: %s: %s\n", rank, #expr,                           \
                   n.ncclGetLastError(NULL));                                  \
            return 1;                                                          \
        }                                                                      \
    } while (0)

static int be_rank(int rank, int world, const char *path)
{
    static unsigned char bytes[BYTES];
    float one = 1;
    ncclUniqueId id;
    ncclComm_t comm;
    nccl_table n;

    nccl_table_open(&n, nccl_host_path());
    if (rank == 0)
        GOOD(n.ncclGetUniqueId(&id));
    if (!(rank == 0 ? put_id(path, &id) : get_id(path, &id)))
        return 1;
    GOOD(n.ncclCommInitRank(&comm, world, id, rank));
    GOOD(n.ncclAllReduce(&one, &one, 1, ncclFloat32, ncclSum, comm, NULL));
    for (size_t i = 0; rank == 0 && i < BYTES; i++)
        bytes[i] = (unsigned char)(i * 31 >> 3);
    GOOD(n.ncclBroadcast(rank == 0 ? bytes : NULL, bytes, BYTES, ncclUint8, 0,
                         comm, NULL));
    for (size_t i = 0; i < BYTES; i++) {
        if (bytes[i] != (unsigned char)(i * 31 >> 3) || one != (float)world)
            return 1;
    }
    GOOD(n.ncclCommDestroy(comm));
    printf("rank %d ok\n", rank);
    return 0;
}

int main(int argc, char **argv)
{
    unsigned char in[4096] = {0}, id[FERRY__UNIQUE_ID], out[FERRY__ID_PICKLE];
    char text[FERRY__ID_BASE64 + 1];
    size_t n;

    if (argc == 5 && strcmp(argv[1], "rank") == 0)
        return be_rank(atoi(argv[2]), atoi(argv[3]), argv[4]);
    if (argc != 3)
        return 2;
    n = read_hex(argv[2], in, sizeof(in));
    if (strcmp(argv[1], "pickle") == 0) {
        ferry__id_pickle(in, out);
        return print_hex(out, sizeof(out));
    }
    if (strcmp(argv[1], "base64") == 0) {
        ferry__id_base64(in, text);
        printf("%s\n", text);
        return 0;
    }
    if (strcmp(argv[1], "unpickle") == 0)
        return ferry__id_unpickle(in, n, id) < 0 ? failed()
                                                 : print_hex(id, sizeof(id));
    return ferry__id_from_base64(argv[2], id) < 0 ? failed()
                                                  : print_hex(id, sizeof(id));
}
