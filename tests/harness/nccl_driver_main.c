/* SPDX-License-Identifier: Apache-2.0 */
/* Turns NCCL's unique id into its forms and back, for tests in other
 * languages. Bytes are hex.
 *   nccl_driver_main pickle|base64 ID     the form of an id
 *   nccl_driver_main unpickle BYTES       the id in a pickle
 *   nccl_driver_main unbase64 TEXT        the id in a text
 * A failure prints its line and ends with 1. */
#include "comm/unique_id.h"

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

int main(int argc, char **argv)
{
    unsigned char in[4096] = {0}, id[FERRY__UNIQUE_ID], out[FERRY__ID_PICKLE];
    char text[FERRY__ID_BASE64 + 1];
    size_t n;

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
