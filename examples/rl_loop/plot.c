/* SPDX-License-Identifier: Apache-2.0 */
/* Drawing with text; see plot.h. */
#include "plot.h"

#include <math.h>
#include <stdbool.h>

enum {
    WIDTH = 760,
    HEIGHT = 300,
    LEFT = 70,
    RIGHT = 150, /* labels of the series stand here */
    TOP = 16,
    BOTTOM = 44,
    POINTS_MAX = 120,
    MARKERS = 6, /* of each series, spread evenly */
    LABEL_GAP = 15
};

static const char *const DASHES[PLOT_SERIES_MAX] = {
    "none", "7 4", "2 3", "10 3 2 3", "12 6", "1 5", "5 2 1 2", "4 8"};
static const char *const COLOURS[PLOT_SERIES_MAX] = {
    "#0b4f8a", "#b3430e", "#1d7a4c", "#7a2a82",
    "#555555", "#8a6d00", "#006d77", "#a0153e"};

typedef struct frame {
    const plot *p;
    const history *h;
    size_t n_points, per_point; /* rounds in one point */
    double y_max;
    double first, last; /* rounds at the ends of the axis */
} frame;

static double value_at(const frame *f, size_t series, size_t point)
{
    const plot_series *s = &f->p->series[series];
    size_t from = point * f->per_point, to = from + f->per_point, n = 0;
    double sum = 0;

    for (size_t i = from; i < to && i < f->h->n; i++, n++)
        sum += ((const double *)&f->h->rows[i])[s->column];
    return n == 0 ? 0 : s->scale * sum / (double)n;
}

static double x_of(const frame *f, size_t point)
{
    double span = f->n_points > 1 ? (double)(f->n_points - 1) : 1;

    return LEFT + (double)point / span * (WIDTH - LEFT - RIGHT);
}

static double y_of(const frame *f, double value)
{
    double share = fmin(fmax(value / f->y_max, 0), 1);

    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
}

/* A round number that is not below and not far above. */
static double round_up(double value)
{
    double power = pow(10, floor(log10(value)));

    for (int i = 0; i < 9; i++) {
        static const double STEPS[] = {1, 1.5, 2, 2.5, 3, 4, 5, 8, 10};

        if (STEPS[i] * power >= value * (1 - 1e-9))
            return STEPS[i] * power;
    }
    return value;
}

static frame make_frame(const plot *p, const history *h)
{
    frame f = {.p = p, .h = h, .y_max = p->y_max};
    double top = 0;

    f.per_point = (h->n + POINTS_MAX - 1) / POINTS_MAX;
    f.n_points = (h->n + f.per_point - 1) / f.per_point;
    f.first = h->rows[0].round;
    f.last = h->rows[h->n - 1].round;
    if (f.y_max > 0)
        return f;
    for (size_t s = 0; s < p->n_series; s++)
        for (size_t i = 0; i < f.n_points; i++)
            top = fmax(top, value_at(&f, s, i));
    f.y_max = top > 0 ? round_up(top) : 1;
    return f;
}

static void write_axes(FILE *out, const frame *f)
{
    for (int i = 0; i <= 5; i++) {
        double value = f->y_max * i / 5, y = y_of(f, value);

        fprintf(out,
                "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" "
                "y2=\"%.1f\"/><text class=\"tick\" x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">%.4g</text>\n",
                LEFT, WIDTH - RIGHT, y, y, LEFT - 8, y + 4, value);
    }
    for (int i = 0; i <= 4; i++) {
        double x = LEFT + (WIDTH - LEFT - RIGHT) * i / 4.0;

        fprintf(out,
                "<text class=\"tick\" x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\">%.0f</text>\n",
                x, HEIGHT - BOTTOM + 18,
                f->first + (f->last - f->first) * i / 4.0);
    }
    fprintf(out,
            "<text class=\"label\" x=\"%d\" y=\"%d\" "
            "text-anchor=\"middle\">round</text>\n"
            "<text class=\"label\" transform=\"translate(14 %d) "
            "rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, (TOP + HEIGHT - BOTTOM) / 2,
            f->p->y_label);
}

/* A shape of its own for each series, around (0, 0). */
static const char *const SHAPES[PLOT_SERIES_MAX] = {
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", /* disc */
    "M-4 -4h8v8h-8z",                     /* square */
    "M0 -5l5 9h-10z",                     /* triangle */
    "M-4 -4l8 8m0 -8l-8 8",               /* cross */
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", /* ring */
    "M0 -5l5 5l-5 5l-5 -5z",              /* diamond */
    "M0 5l5 -9h-10z",                     /* its reverse */
    "M-5 0h10m-5 -5v10"};                 /* plus */
static const bool HOLLOW[PLOT_SERIES_MAX] = {false, true,  false, false,
                                             true,  false, true,  false};

static void write_marker(FILE *out, size_t series, double x, double y)
{
    fprintf(out,
            "<path transform=\"translate(%.1f %.1f)\" d=\"%s\" fill=\"%s\" "
            "stroke=\"%s\" stroke-width=\"1.5\"/>",
            x, y, SHAPES[series], HOLLOW[series] ? "#fff" : COLOURS[series],
            COLOURS[series]);
}

static void write_series(FILE *out, const frame *f, size_t s)
{
    size_t every = f->n_points / MARKERS + 1;

    fprintf(out,
            "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
            "stroke-dasharray=\"%s\" points=\"",
            COLOURS[s], DASHES[s]);
    for (size_t i = 0; i < f->n_points; i++)
        fprintf(out, "%.1f,%.1f ", x_of(f, i), y_of(f, value_at(f, s, i)));
    fprintf(out, "\"/>\n");
    /* Shifted by series, so that markers of equal lines do not cover each
     * other. */
    for (size_t i = s * every / (f->p->n_series + 1); i < f->n_points;
         i += every)
        write_marker(out, s, x_of(f, i), y_of(f, value_at(f, s, i)));
    fprintf(out, "\n");
}

static void write_label(FILE *out, const frame *f, size_t s, double y)
{
    int x = WIDTH - RIGHT + 10;

    fprintf(out,
            "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" "
            "stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"/>",
            x, x + 36, y, y, COLOURS[s], DASHES[s]);
    write_marker(out, s, x + 18, y);
    fprintf(out, "<text class=\"label\" x=\"%d\" y=\"%.1f\">%s</text>\n",
            x + 42, y + 4, f->p->series[s].name);
}

/* Labels at the ends of the lines, moved apart where they would overlap:
 * first downwards, then up again from the bottom. */
static void write_labels(FILE *out, const frame *f)
{
    size_t order[PLOT_SERIES_MAX], n = f->p->n_series;
    double y[PLOT_SERIES_MAX], last = HEIGHT - BOTTOM + LABEL_GAP;

    for (size_t i = 0; i < n; i++) {
        double end = value_at(f, i, f->n_points - 1);
        size_t at = i;

        for (; at > 0 && value_at(f, order[at - 1], f->n_points - 1) < end;
             at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (size_t i = 0; i < n; i++) {
        y[i] = y_of(f, value_at(f, order[i], f->n_points - 1));
        if (i > 0)
            y[i] = fmax(y[i], y[i - 1] + LABEL_GAP);
    }
    for (size_t i = n; i-- > 0;) {
        y[i] = fmin(y[i], last - LABEL_GAP);
        last = y[i];
        write_label(out, f, order[i], y[i]);
    }
}

void plot_write(FILE *out, const plot *p, const history *h)
{
    frame f;

    fprintf(out, "<figure><h2>%s</h2>\n", p->title);
    if (h->n > 0) {
        f = make_frame(p, h);
        fprintf(out,
                "<svg viewBox=\"0 0 %d %d\" role=\"img\" "
                "aria-label=\"%s\">\n",
                WIDTH, HEIGHT, p->title);
        write_axes(out, &f);
        for (size_t s = 0; s < p->n_series; s++)
            write_series(out, &f, s);
        write_labels(out, &f);
        fprintf(out, "</svg>\n");
    }
    fprintf(out, "<figcaption>%s</figcaption></figure>\n", p->caption);
}
