/* SPDX-License-Identifier: Apache-2.0 */
/* An empty round (start, update without names, finish) beside a no-op round
 * trip, through one HTTP client and the same servers, in turn.
 *   bench_round URL [--json] [--rounds N] [--warm N]
 * The no-op is POST /ferry/abort_weight_update while no round is open: like
 * each call of a round it goes out to every rank and is waited for, and it
 * changes nothing. GET /get_world_size, which no rank sees, is printed too.
 * Invariant: the servers are fresh: with a round behind them, a list without
 * names means the names of that round. */
#include <ferry/ferry.h>

#include <curl/curl.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS_MAX 1001
#define GOAL       3.0

static const char init_info[] = "{\"packed\":false}";
static const char empty_info[] = "{\"names\":[],\"dtype_names\":[],"
                                 "\"shapes\":[]}";

typedef struct bench {
    ferry_client client;
    CURL *get; /* its own connection, kept as the client keeps its own */
    char url[512];
} bench;

enum { ROUND, START, UPDATE, FINISH, NO_OP, PLAIN_GET, N_TIMES };

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static size_t drop(char *bytes, size_t size, size_t n, void *arg)
{
    (void)bytes, (void)arg;
    return size * n;
}

static ferry_status plain_get(bench *b)
{
    CURLcode code = curl_easy_perform(b->get);

    if (code != CURLE_OK)
        return ferry_fail(FERRY_ECONN, "%s: %s", b->url,
                          curl_easy_strerror(code));
    return FERRY_OK;
}

static ferry_status run_round(bench *b, double *us)
{
    const ferry_client_ops *ops = b->client.ops;
    void *self = b->client.self;
    double at[4];

    at[0] = now_us();
    FERRY_TRY(ops->start_weight_update(self));
    at[1] = now_us();
    FERRY_TRY(ops->update_weights(self, empty_info));
    at[2] = now_us();
    FERRY_TRY(ops->finish_weight_update(self, NULL));
    at[3] = now_us();
    us[ROUND] = at[3] - at[0];
    us[START] = at[1] - at[0];
    us[UPDATE] = at[2] - at[1];
    us[FINISH] = at[3] - at[2];
    return FERRY_OK;
}

static ferry_status run_all(bench *b, double *us)
{
    double began;

    FERRY_TRY(run_round(b, us));
    began = now_us();
    FERRY_TRY(b->client.ops->abort_weight_update(b->client.self));
    us[NO_OP] = now_us() - began;
    began = now_us();
    FERRY_TRY(plain_get(b));
    us[PLAIN_GET] = now_us() - began;
    return FERRY_OK;
}

static ferry_status bench_open(bench *b, const char *url)
{
    snprintf(b->url, sizeof(b->url), "%s/get_world_size", url);
    FERRY_TRY(ferry_client_http(url, NULL, &b->client));
    b->get = curl_easy_init();
    if (b->get == NULL)
        return ferry_fail(FERRY_ENOMEM, "no HTTP handle");
    curl_easy_setopt(b->get, CURLOPT_URL, b->url);
    curl_easy_setopt(b->get, CURLOPT_PROXY, "");
    curl_easy_setopt(b->get, CURLOPT_WRITEFUNCTION, drop);
    curl_easy_setopt(b->get, CURLOPT_FAILONERROR, 1L);
    return b->client.ops->init_weight_transfer_engine(b->client.self,
                                                      init_info);
}

static void bench_close(bench *b)
{
    curl_easy_cleanup(b->get);
    ferry_client_close(&b->client);
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double at_share(const double *sorted, int n, double share)
{
    return sorted[(int)floor(share * (double)(n - 1) + 0.5)];
}

static bool report(bool json, double us[N_TIMES][ROUNDS_MAX], int n)
{
    double mid[N_TIMES], ratio;
    bool ok;

    for (int k = 0; k < N_TIMES; k++) {
        qsort(us[k], (size_t)n, sizeof(double), by_value);
        mid[k] = us[k][n / 2];
    }
    ratio = mid[ROUND] / mid[NO_OP];
    ok = ratio <= GOAL;
    if (json)
        printf("{\"bench\":\"worker\",\"case\":\"empty_round\","
               "\"value\":%.3f,\"unit\":\"x no-op\",\"limit\":%.1f,"
               "\"runs\":%d,\"us\":%.1f,\"us_p10\":%.1f,\"us_p90\":%.1f,"
               "\"limit_p10\":%.1f,\"limit_p90\":%.1f,"
               "\"start_us\":%.1f,\"update_us\":%.1f,\"finish_us\":%.1f,"
               "\"peers\":{\"no_op_us\":%.1f,\"get_world_size_us\":%.1f},"
               "\"goal\":%.1f,\"ok\":%s}\n",
               ratio, mid[NO_OP], n, mid[ROUND], at_share(us[ROUND], n, 0.1),
               at_share(us[ROUND], n, 0.9), at_share(us[NO_OP], n, 0.1),
               at_share(us[NO_OP], n, 0.9), mid[START], mid[UPDATE],
               mid[FINISH], mid[NO_OP], mid[PLAIN_GET], GOAL,
               ok ? "true" : "false");
    else
        printf("empty round %.0f us (start %.0f, update %.0f, finish %.0f; "
               "p10 %.0f, p90 %.0f)\nno-op %.0f us, GET /get_world_size "
               "%.0f us\nratio %.2f (goal %.1f: %s)\n",
               mid[ROUND], mid[START], mid[UPDATE], mid[FINISH],
               at_share(us[ROUND], n, 0.1), at_share(us[ROUND], n, 0.9),
               mid[NO_OP], mid[PLAIN_GET], ratio, GOAL, ok ? "met" : "missed");
    return ok;
}

static ferry_status measure(bench *b, int warm, int n,
                            double us[N_TIMES][ROUNDS_MAX])
{
    double one[N_TIMES];

    for (int r = -warm; r < n; r++) {
        FERRY_TRY(run_all(b, one));
        for (int k = 0; r >= 0 && k < N_TIMES; k++)
            us[k][r] = one[k];
    }
    return FERRY_OK;
}

int main(int argc, char **argv)
{
    static double us[N_TIMES][ROUNDS_MAX];
    const char *url = NULL;
    int rounds = 101, warm = 10;
    bool json = false, good = false;
    ferry_status st;
    bench b = {.get = NULL};

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            rounds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--warm") == 0 && i + 1 < argc)
            warm = atoi(argv[++i]);
        else if (argv[i][0] != '-')
            url = argv[i];
    }
    if (url == NULL || rounds < 1 || rounds > ROUNDS_MAX || warm < 0) {
        fprintf(stderr,
                "usage: bench_round URL [--json] [--rounds 1..%d] [--warm N]\n"
                "URL is a fresh ferry serve; bench_worker starts one\n",
                ROUNDS_MAX);
        return 1;
    }
    curl_global_init(CURL_GLOBAL_DEFAULT);
    st = bench_open(&b, url);
    if (st == FERRY_OK)
        st = measure(&b, warm, rounds, us);
    if (st == FERRY_OK)
        good = report(json, us, rounds);
    else
        fprintf(stderr, "bench_round: %s\n", ferry_last_error());
    if (b.client.ops != NULL)
        bench_close(&b);
    curl_global_cleanup();
    return st < 0 ? 1 : good ? 0 : 2;
}
