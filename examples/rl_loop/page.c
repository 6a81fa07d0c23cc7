/* SPDX-License-Identifier: Apache-2.0 */
/* The page of a run: plots, a table of the last rounds, all numbers as JSON
 * for whoever wants to draw them anew. See page.h. */
#include "page.h"

#include "plot.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#define TABLE_ROWS   20
#define COLUMN(name) (offsetof(history_row, name) / sizeof(double))

static const plot PLOTS[] = {
    {.title = "Reward",
     .y_label = "share of answers",
     .caption = "Mean reward of a round&rsquo;s answers, and the share of "
                "answers that are right in every place.",
     .series = {{"reward", COLUMN(reward), 1}, {"solved", COLUMN(solved), 1}},
     .n_series = 2,
     .y_max = 1},
    {.title = "Sync time by phase",
     .y_label = "milliseconds",
     .caption = "What one update spends its time on, as the sender saw it; "
                "total is from pause to resume; stopped is how long the last "
                "commit kept generation waiting, where the server says so.",
     .series = {{"total", COLUMN(sync_ms), 1},
                {"start", COLUMN(start_ms), 1},
                {"gather", COLUMN(gather_ms), 1},
                {"pack", COLUMN(pack_ms), 1},
                {"wire", COLUMN(wire_ms), 1},
                {"digest", COLUMN(digest_ms), 1},
                {"finish", COLUMN(finish_ms), 1},
                {"stopped", COLUMN(stop_ms), 1}},
     .n_series = 8},
    {.title = "Which version made which tokens",
     .y_label = "version (step)",
     .caption = "The trainer&rsquo;s version, and the newest and the oldest "
                "version among those that made the round&rsquo;s tokens. In "
                "step when every update arrives; flat when none does.",
     .series = {{"trainer", COLUMN(round), 1},
                {"newest", COLUMN(newest), 1},
                {"oldest", COLUMN(oldest), 1}},
     .n_series = 3},
    {.title = "Tokens by age",
     .y_label = "tokens a round",
     .caption = "How many versions behind the trainer each token&rsquo;s maker "
                "was. Off-policy tokens are importance-weighted, or dropped "
                "when they are too old.",
     .series = {{"current", COLUMN(age_0), 1},
                {"1 behind", COLUMN(age_1), 1},
                {"2 behind", COLUMN(age_2), 1},
                {"3+ behind", COLUMN(age_3), 1},
                {"weighted", COLUMN(weighted), 1},
                {"dropped", COLUMN(dropped), 1}},
     .n_series = 6},
    {.title = "Where a round&rsquo;s time goes",
     .y_label = "milliseconds",
     .caption = "Waiting for answers, the trainer&rsquo;s passes and step, "
                "the update.",
     .series = {{"round", COLUMN(round_ms), 1},
                {"rollout", COLUMN(rollout_ms), 1},
                {"train", COLUMN(train_ms), 1},
                {"sync", COLUMN(sync_ms), 1}},
     .n_series = 4},
    {.title = "Bytes",
     .y_label = "kB an update",
     .caption = "Left the trainer in an update, all ranks together.",
     .series = {{"sent", COLUMN(bytes), 1e-3}},
     .n_series = 1},
    {.title = "The oracle",
     .y_label = "millionths",
     .caption = "Largest difference between a worker&rsquo;s logprob and the "
                "trainer&rsquo;s own for the same weights. Above 1000 the "
                "loop ends.",
     .series = {{"difference", COLUMN(drift), 1e6}},
     .n_series = 1}};

static const char HEAD[] =
    "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n"
    "<style>\n"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:800px;margin:2em auto;"
    "padding:0 1em;color:#111;background:#fff}\n"
    "figure{margin:2em 0}svg{width:100%;height:auto}\n"
    "figcaption{color:#333}h1{margin-bottom:0}h2{margin:0;font-size:1.1em}\n"
    ".grid{stroke:#ddd}.tick,.label{font-size:12px;fill:#222}\n"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}\n"
    "td,th{padding:.1em .6em;text-align:right;border-bottom:1px solid #ddd}\n"
    "div{overflow-x:auto}\n"
    "</style>\n";

static void write_text(FILE *f, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '&')
            fputs("&amp;", f);
        else if (*text == '<')
            fputs("&lt;", f);
        else
            fputc(*text, f);
    }
}

static void write_table(FILE *f, const history *h)
{
    size_t from = h->n > TABLE_ROWS ? h->n - TABLE_ROWS : 0;

    fprintf(f, "<h2>The last rounds</h2><div tabindex=\"0\"><table><tr>"
               "<th>round</th><th>reward</th><th>solved</th><th>tokens/s</th>"
               "<th>sync ms</th><th>kB</th><th>versions</th><th>old tokens"
               "</th><th>drift</th></tr>\n");
    for (size_t i = from; i < h->n; i++) {
        const history_row *r = &h->rows[i];

        fprintf(f,
                "<tr><td>%.0f</td><td>%.3f</td><td>%.3f</td><td>%.0f</td>"
                "<td>%.1f</td><td>%.0f</td><td>%.0f&ndash;%.0f</td>"
                "<td>%.0f</td><td>%.1e</td></tr>\n",
                r->round, r->reward, r->solved,
                r->round_ms > 0 ? r->tokens / r->round_ms * 1e3 : 0, r->sync_ms,
                r->bytes * 1e-3, r->oldest, r->newest, r->weighted + r->dropped,
                r->drift);
    }
    fprintf(f, "</table></div>\n");
}

static void write_json(FILE *f, const history *h)
{
    fprintf(f, "<script type=\"application/json\" id=\"rounds\">[");
    for (size_t i = 0; i < h->n; i++) {
        const double *values = (const double *)&h->rows[i];

        fprintf(f, "%s\n{", i == 0 ? "" : ",");
        for (size_t c = 0; c < HISTORY_WIDTH; c++)
            fprintf(f, "%s\"%s\":%.9g", c == 0 ? "" : ",", history_name(c),
                    isfinite(values[c]) ? values[c] : -1);
        fprintf(f, "}");
    }
    fprintf(f, "]</script>\n");
}

ferry_status page_write(const history *h, const char *title, const char *note,
                        const char *path)
{
    char temporary[4096];
    FILE *f;
    int failed;

    snprintf(temporary, sizeof temporary, "%s.part", path);
    f = fopen(temporary, "w");
    if (f == NULL)
        return ferry_fail(FERRY_EIO, "cannot write %s: %s", temporary,
                          strerror(errno));
    fprintf(f, "%s<title>", HEAD);
    write_text(f, title);
    fprintf(f, "</title></head><body><h1>");
    write_text(f, title);
    fprintf(f, "</h1><p>");
    write_text(f, note);
    fprintf(f, "</p>\n");
    for (size_t i = 0; i < sizeof PLOTS / sizeof PLOTS[0]; i++)
        plot_write(f, &PLOTS[i], h);
    write_table(f, h);
    write_json(f, h);
    fprintf(f, "</body></html>\n");
    failed = ferror(f);
    if (fclose(f) != 0 || failed || rename(temporary, path) != 0)
        return ferry_fail(FERRY_EIO, "cannot write %s", path);
    return FERRY_OK;
}
