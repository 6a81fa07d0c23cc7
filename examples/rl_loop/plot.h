/* SPDX-License-Identifier: Apache-2.0 */
/* Line plots as inline SVG. Series differ in dash, marker and a label at
 * their end, so that no plot needs colour to be read. */
#ifndef RL_LOOP_PLOT_H
#define RL_LOOP_PLOT_H

#include "history.h"

#include <stdio.h>

#define PLOT_SERIES_MAX 8

typedef struct plot_series {
    const char *name;
    size_t column; /* of history_row */
    double scale;  /* what values are multiplied by */
} plot_series;

typedef struct plot {
    const char *title, *y_label, *caption;
    plot_series series[PLOT_SERIES_MAX];
    size_t n_series;
    double y_max; /* 0: from the values */
} plot;

/* Values are means over equal runs of rounds where there are many. */
void plot_write(FILE *out, const plot *p, const history *h);

#endif
