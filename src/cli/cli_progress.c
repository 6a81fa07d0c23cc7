/* SPDX-License-Identifier: Apache-2.0 */
/* Progress bars. Invariant: at most ten writes a second, so that a slow
 * terminal never holds up the bytes, and log lines never land in a bar. */
#include "cli/cli_progress.h"

#include "base/clock.h"
#include "base/log.h"
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BAR_WIDTH 30
#define REDRAW_NS INT64_C(100000000)

/* A function of the program is handed every line, whatever the setting. */
static ferry_log_level lowest_level;

static void log_over_bar(ferry_log_level level, const char *line, void *arg)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};

    (void)arg;
    if (level > lowest_level)
        return;
    fprintf(stderr, "\r\033[Kferry: %s: %s\n", names[level], line);
}

void cli_progress_begin(cli_progress *progress, const char *label, bool quiet)
{
    memset(progress, 0, sizeof(*progress));
    progress->terminal = isatty(STDERR_FILENO) == 1;
    progress->quiet = quiet;
    progress->started_ns = ferry__now_ns();
    snprintf(progress->label, sizeof(progress->label), "%s", label);
    if (!progress->terminal)
        return;
    lowest_level = FERRY_LOG_ERROR;
    while (lowest_level < FERRY_LOG_DEBUG &&
           ferry__log_enabled(lowest_level + 1))
        lowest_level++;
    ferry_log_set(log_over_bar, NULL);
}

static void draw_bar(cli_progress *progress, uint64_t done, uint64_t total,
                     double seconds)
{
    char bar[BAR_WIDTH + 1], done_text[24], total_text[24];
    int filled = total ? (int)((double)BAR_WIDTH * (double)done / (double)total)
                       : BAR_WIDTH;

    if (filled > BAR_WIDTH)
        filled = BAR_WIDTH;
    memset(bar, ' ', BAR_WIDTH);
    memset(bar, '#', (size_t)filled);
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r\033[K%s [%s] %s of %s, %.2f GB/s", progress->label, bar,
            cli_bytes_text(done_text, sizeof(done_text), done),
            cli_bytes_text(total_text, sizeof(total_text), total),
            seconds > 0 ? (double)done / 1e9 / seconds : 0.0);
    fflush(stderr);
    progress->drawn = true;
}

void cli_progress_update(void *arg, uint64_t done, uint64_t total)
{
    cli_progress *progress = arg;
    int64_t now = ferry__now_ns();
    double seconds = (double)(now - progress->started_ns) / 1e9;
    int quarter;

    if (done > total)
        done = total;
    if (progress->terminal) {
        if (now - progress->shown_ns < REDRAW_NS &&
            (done < total || progress->full))
            return;
        progress->full = done == total;
        progress->shown_ns = now;
        draw_bar(progress, done, total, seconds);
        return;
    }
    quarter = total ? (int)(4.0 * (double)done / (double)total) : 4;
    if (progress->quiet || quarter <= progress->shown_quarter)
        return;
    progress->shown_quarter = quarter;
    fprintf(stderr, "%s: %d %% after %.2f s\n", progress->label, 25 * quarter,
            seconds);
}

void cli_progress_end(cli_progress *progress)
{
    if (progress->drawn)
        fprintf(stderr, "\r\033[K");
    if (progress->terminal)
        ferry_log_set(NULL, NULL);
}
