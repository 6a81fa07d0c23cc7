/* SPDX-License-Identifier: Apache-2.0 */
/* The rounds so far; see history.h. */
#include "history.h"

#include <stdlib.h>

ferry_status history_add(history *h, const history_row *row)
{
    if (h->n == h->capacity) {
        size_t capacity = h->capacity == 0 ? 256 : h->capacity * 2;
        history_row *rows = realloc(h->rows, capacity * sizeof *rows);

        if (rows == NULL)
            return ferry_fail(FERRY_ENOMEM, "history: out of memory");
        h->rows = rows;
        h->capacity = capacity;
    }
    h->rows[h->n++] = *row;
    return FERRY_OK;
}

void history_free(history *h)
{
    free(h->rows);
    *h = (history){0};
}

double history_reward(const history *h, size_t n)
{
    double sum = 0;

    if (n > h->n)
        n = h->n;
    for (size_t i = h->n - n; i < h->n; i++)
        sum += h->rows[i].reward;
    return n == 0 ? 0 : sum / (double)n;
}

const char *history_name(size_t column)
{
    static const char *const names[] = {
#define HISTORY_NAME(name) #name,
        HISTORY_COLUMNS(HISTORY_NAME)
#undef HISTORY_NAME
    };

    return names[column];
}
