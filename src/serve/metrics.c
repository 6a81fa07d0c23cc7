/* SPDX-License-Identifier: Apache-2.0 */
/* Prometheus metrics; see metrics.h. */
#include "serve/metrics.h"

#include <string.h>

static const double bucket_bounds[FERRY__BUCKETS] = {0.01, 0.1, 1,   10, 30,
                                                     60,   120, 300, 600};
static const char *const operation_names[FERRY__OP_COUNT] = {
    "init", "shutdown", "start", "start_draft", "update", "finish"};

void ferry__metrics_init(ferry__metrics *m)
{
    memset(m, 0, sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
}

void ferry__metrics_begin(ferry__metrics *m, ferry__operation op)
{
    pthread_mutex_lock(&m->lock);
    m->operations[op].in_flight++;
    pthread_mutex_unlock(&m->lock);
}

void ferry__metrics_end(ferry__metrics *m, ferry__operation op, double seconds)
{
    int i = 0;

    pthread_mutex_lock(&m->lock);
    while (i < FERRY__BUCKETS && seconds > bucket_bounds[i])
        i++;
    m->operations[op].buckets[i]++;
    m->operations[op].count++;
    m->operations[op].sum += seconds;
    m->operations[op].in_flight--;
    pthread_mutex_unlock(&m->lock);
}

void ferry__metrics_request(ferry__metrics *m, const char *finish_reason,
                            int32_t prompt_tokens, int32_t output_tokens)
{
    pthread_mutex_lock(&m->lock);
    m->prompt_tokens += (uint64_t)prompt_tokens;
    m->generation_tokens += (uint64_t)output_tokens;
    if (strcmp(finish_reason, "stop") == 0)
        m->requests_stop++;
    else if (strcmp(finish_reason, "length") == 0)
        m->requests_length++;
    else if (strcmp(finish_reason, "abort") == 0)
        m->requests_abort++;
    else
        m->requests_error++;
    pthread_mutex_unlock(&m->lock);
}

void ferry__metrics_round(ferry__metrics *m, bool finished,
                          const ferry__round_sums *sums)
{
    pthread_mutex_lock(&m->lock);
    if (finished)
        m->rounds_finished++;
    else
        m->rounds_failed++;
    for (int i = 0; i < FERRY__PHASE_COUNT; i++)
        m->rounds.phase_seconds[i] += sums->phase_seconds[i];
    m->rounds.stop_seconds += sums->stop_seconds;
    m->rounds.bytes_declared += sums->bytes_declared;
    m->rounds.bytes_received += sums->bytes_received;
    m->rounds.bytes_loaded += sums->bytes_loaded;
    pthread_mutex_unlock(&m->lock);
}

static void counter(ferry__str *out, const char *name, const char *help,
                    const char *type, double value)
{
    ferry__str_printf(out, "# HELP %s %s\n# TYPE %s %s\n%s %.17g\n", name, help,
                      name, type, name, value);
}

static void operations_text(const ferry__metrics *m, ferry__str *out)
{
    static const char *const name =
        "vllm:rl_weight_update_operation_duration_seconds";
    static const char *const flight =
        "vllm:rl_weight_update_operations_in_flight";

    ferry__str_printf(out,
                      "# HELP %s Duration of weight transfer calls.\n"
                      "# TYPE %s histogram\n",
                      name, name);
    for (int op = 0; op < FERRY__OP_COUNT; op++) {
        uint64_t sum = 0;

        for (int i = 0; i < FERRY__BUCKETS; i++) {
            sum += m->operations[op].buckets[i];
            ferry__str_printf(
                out, "%s_bucket{operation=\"%s\",le=\"%g\"} %llu\n", name,
                operation_names[op], bucket_bounds[i], (unsigned long long)sum);
        }
        ferry__str_printf(out,
                          "%s_bucket{operation=\"%s\",le=\"+Inf\"} %llu\n"
                          "%s_sum{operation=\"%s\"} %.9g\n"
                          "%s_count{operation=\"%s\"} %llu\n",
                          name, operation_names[op],
                          (unsigned long long)m->operations[op].count, name,
                          operation_names[op], m->operations[op].sum, name,
                          operation_names[op],
                          (unsigned long long)m->operations[op].count);
    }
    ferry__str_printf(out,
                      "# HELP %s Weight transfer calls in progress.\n"
                      "# TYPE %s gauge\n",
                      flight, flight);
    for (int op = 0; op < FERRY__OP_COUNT; op++)
        ferry__str_printf(out, "%s{operation=\"%s\"} %lld\n", flight,
                          operation_names[op],
                          (long long)m->operations[op].in_flight);
}

static void requests_text(const ferry__metrics *m, ferry__str *out)
{
    static const char *const name = "vllm:request_success_total";
    const struct {
        const char *reason;
        uint64_t n;
    } rows[] = {{"stop", m->requests_stop},
                {"length", m->requests_length},
                {"abort", m->requests_abort},
                {"error", m->requests_error}};

    ferry__str_printf(out,
                      "# HELP %s Requests that ended, by reason.\n"
                      "# TYPE %s counter\n",
                      name, name);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ferry__str_printf(out, "%s{finished_reason=\"%s\"} %llu\n", name,
                          rows[i].reason, (unsigned long long)rows[i].n);
}

static void rounds_text(const ferry__round_sums *sums, ferry__str *out)
{
    static const char *const seconds = "ferry:round_phase_seconds_total";
    static const char *const bytes = "ferry:round_bytes_total";
    const struct {
        const char *kind;
        uint64_t n;
    } rows[] = {{"declared", sums->bytes_declared},
                {"received", sums->bytes_received},
                {"loaded", sums->bytes_loaded}};

    ferry__str_printf(out,
                      "# HELP %s Wall time of weight updates, by phase.\n"
                      "# TYPE %s counter\n",
                      seconds, seconds);
    for (int i = 0; i < FERRY__PHASE_COUNT; i++)
        ferry__str_printf(out, "%s{phase=\"%s\"} %.9g\n", seconds,
                          ferry__round_phase_name((ferry__round_phase)i),
                          sums->phase_seconds[i]);
    ferry__str_printf(out,
                      "# HELP %s Bytes of weight updates, all ranks together.\n"
                      "# TYPE %s counter\n",
                      bytes, bytes);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ferry__str_printf(out, "%s{kind=\"%s\"} %llu\n", bytes, rows[i].kind,
                          (unsigned long long)rows[i].n);
}

void ferry__metrics_text(ferry__metrics *m, int32_t running, int32_t waiting,
                         ferry__str *out)
{
    pthread_mutex_lock(&m->lock);
    counter(out, "vllm:num_requests_running", "Requests in execution.", "gauge",
            running);
    counter(out, "vllm:num_requests_waiting", "Requests that wait.", "gauge",
            waiting);
    counter(out, "vllm:prompt_tokens_total", "Prompt tokens processed.",
            "counter", (double)m->prompt_tokens);
    counter(out, "vllm:generation_tokens_total", "Tokens generated.", "counter",
            (double)m->generation_tokens);
    requests_text(m, out);
    operations_text(m, out);
    counter(out, "ferry:rounds_finished_total", "Weight updates committed.",
            "counter", (double)m->rounds_finished);
    counter(out, "ferry:rounds_failed_total", "Weight updates that failed.",
            "counter", (double)m->rounds_failed);
    counter(out, "ferry:commit_stop_seconds_total",
            "Time in which weight updates kept generation waiting.", "counter",
            m->rounds.stop_seconds);
    rounds_text(&m->rounds, out);
    pthread_mutex_unlock(&m->lock);
}
