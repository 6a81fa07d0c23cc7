/* SPDX-License-Identifier: Apache-2.0 */
/* Reading of the setting `fault`; see fault_text.h.
 * Invariant: nothing here is random; the seed and the place decide. */
#include "base/fault_text.h"

#include "base/config.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A script gives a running server a new fault by writing the file anew. */
static ferry_status read_file(const char *path, char *out)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    out[0] = '\0';
    if (fd < 0 && errno == ENOENT)
        return FERRY_OK;
    if (fd < 0)
        return ferry_fail(FERRY_EIO, "setting fault: %s: %s", path,
                          strerror(errno));
    n = read(fd, out, FERRY__FAULT_TEXT_BYTES - 1);
    close(fd);
    if (n < 0)
        return ferry_fail(FERRY_EIO, "setting fault: %s: %s", path,
                          strerror(errno));
    out[n] = '\0';
    return FERRY_OK;
}

ferry_status ferry__fault_text(char out[FERRY__FAULT_TEXT_BYTES])
{
    const char *text = ferry__config_get(FERRY__CONFIG_FAULT);
    size_t n = strlen(text);

    if (text[0] == '@')
        return read_file(text + 1, out);
    if (n >= FERRY__FAULT_TEXT_BYTES)
        return ferry_fail(FERRY_EINVAL,
                          "setting fault: %zu bytes, at most %d are read", n,
                          FERRY__FAULT_TEXT_BYTES - 1);
    memcpy(out, text, n + 1);
    return FERRY_OK;
}

bool ferry__fault_is_file(void)
{
    return ferry__config_get(FERRY__CONFIG_FAULT)[0] == '@';
}

bool ferry__fault_item(const char **at, const char **out_item, size_t *out_n)
{
    const char *text = *at + strspn(*at, ", \n");
    size_t n = strcspn(text, ", \n");

    *at = text + n;
    *out_item = text;
    *out_n = n;
    return n > 0;
}

bool ferry__fault_is_comm(const char *item, size_t n)
{
    return n > 5 && memcmp(item, "comm:", 5) == 0;
}

bool ferry__fault_number(const char *text, size_t n, uint64_t *out)
{
    uint64_t value = 0;

    if (n == 0)
        return false;
    for (size_t i = 0; i < n; i++) {
        uint64_t digit = (uint64_t)(text[i] - '0');

        if (text[i] < '0' || text[i] > '9' ||
            value > ((uint64_t)INT64_MAX - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *out = value;
    return true;
}

bool ferry__fault_time(const char *text, size_t n, int64_t *out_ms)
{
    uint64_t value, unit = 1;

    if (n > 2 && memcmp(text + n - 2, "ms", 2) == 0) {
        n -= 2;
    } else if (n > 1 && text[n - 1] == 's') {
        n -= 1;
        unit = 1000;
    }
    if (!ferry__fault_number(text, n, &value) || value > 86400000 / unit)
        return false;
    *out_ms = (int64_t)(value * unit);
    return true;
}

bool ferry__fault_is_word(const char *text, size_t n, const char *word)
{
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

uint64_t ferry__fault_mix(uint64_t x)
{
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
    return x ^ (x >> 33);
}

void ferry__fault_flip(uint64_t seed, uint64_t at, unsigned char *byte)
{
    *byte ^=
        (unsigned char)(1u << (ferry__fault_mix(seed ^ ferry__fault_mix(at)) &
                               7));
}
