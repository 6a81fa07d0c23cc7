/* SPDX-License-Identifier: Apache-2.0 */
/* One round after the other. Invariant: at the head of round k the policy's
 * weights are version "step-k", which is what the server serves (but not with
 * --no-sync). */
#include "loop.h"

#include "checkpoint.h"
#include "clock.h"
#include "graph.h"
#include "grpo.h"
#include "oracle.h"
#include "page.h"
#include "pipeline.h"
#include "rollout.h"
#include "server.h"
#include "sync.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define REWARD_WINDOW 10
#define IN_FLIGHT     64
#define AGE_MAX       4
#define RATIO_MAX     2.0
/* Without sync the reward may wander by this much and no more. */
#define CHANCE_DRIFT 0.1

typedef struct loop {
    const options *o;
    rng random;
    policy *p;
    adam *a;
    graph *g;
    policy *before; /* asynchronous: the weights of the version before */
    graph *before_g;
    history h;
    int64_t round;
    server s;
    sync_channel *sync;
    rollout *rollouts; /* synchronous, or */
    pipeline *pipe;    /* asynchronous */
    size_t n;          /* samples a round */
    sample *samples;
    int32_t *tokens;                 /* (n, TASK_LENGTH) */
    float *logprobs;                 /* (n, TASK_LENGTH, vocab) */
    float *coefficients, *entropies; /* (n, TASK_LENGTH) */
    float *gradient;
    double started_ms, sync_total_ms;
    int64_t resumed_at;
} loop;

static ferry_status make_folder(const char *path)
{
    if (mkdir(path, 0755) != 0 && errno != EEXIST)
        return ferry_fail(FERRY_EIO, "cannot make %s: %s", path,
                          strerror(errno));
    return FERRY_OK;
}

static const char *path_in(const loop *l, const char *name, char *out,
                           size_t size)
{
    snprintf(out, size, "%s/%s", l->o->folder, name);
    return out;
}

static checkpoint as_checkpoint(loop *l)
{
    return (checkpoint){.p = l->p,
                        .a = l->a,
                        .h = &l->h,
                        .random = &l->random,
                        .seed = l->o->seed,
                        .round = l->round};
}

static ferry_status save(loop *l)
{
    checkpoint c = as_checkpoint(l);
    char path[4096];

    return checkpoint_save(
        &c, path_in(l, "checkpoint.safetensors", path, sizeof path));
}

static ferry_status resume(loop *l)
{
    checkpoint c = as_checkpoint(l);
    char path[4096];
    ferry_status st = checkpoint_load(
        &c, path_in(l, "checkpoint.safetensors", path, sizeof path));

    if (st == FERRY_EUNKNOWN)
        return FERRY_OK; /* killed before the first checkpoint */
    FERRY_TRY(st);
    l->round = c.round;
    printf("resumed at round %lld, reward %.3f\n", (long long)l->round,
           history_reward(&l->h, REWARD_WINDOW));
    return FERRY_OK;
}

/* A second policy for the oracle; until the first step it equals the first
 * one. */
static ferry_status keep_before(loop *l)
{
    rng random = l->random;

    FERRY_TRY(policy_create(&policy_small, &random, &l->before));
    FERRY_TRY(
        graph_create(l->before, TASK_LENGTH, l->o->threads, &l->before_g));
    memcpy(l->before->weights, l->p->weights,
           l->p->n_weights * sizeof *l->p->weights);
    return FERRY_OK;
}

static ferry_status make_trainer(loop *l)
{
    size_t vocab = (size_t)policy_small.vocab, positions;

    l->random.state = rng_mix(l->o->seed + 1);
    l->n = (size_t)l->o->prompts * (size_t)l->o->group;
    positions = l->n * TASK_LENGTH;
    FERRY_TRY(policy_create(&policy_small, &l->random, &l->p));
    FERRY_TRY(adam_create(l->p->n_weights, l->o->rate, &l->a));
    FERRY_TRY(graph_create(l->p, TASK_LENGTH, l->o->threads, &l->g));
    l->samples = calloc(l->n, sizeof *l->samples);
    l->tokens = calloc(positions, sizeof *l->tokens);
    l->logprobs = calloc(positions * vocab, sizeof *l->logprobs);
    l->coefficients = calloc(positions, sizeof *l->coefficients);
    l->entropies = calloc(positions, sizeof *l->entropies);
    l->gradient = calloc(l->p->n_weights, sizeof *l->gradient);
    if (l->samples == NULL || l->tokens == NULL || l->logprobs == NULL ||
        l->coefficients == NULL || l->entropies == NULL || l->gradient == NULL)
        return ferry_fail(FERRY_ENOMEM, "loop: out of memory");
    if (l->o->resume)
        FERRY_TRY(resume(l));
    return l->o->asynchronous ? keep_before(l) : FERRY_OK;
}

static ferry_status make_server(loop *l)
{
    server_options so = {.program = l->o->program,
                         .folder = l->o->folder,
                         .tp = l->o->tp,
                         .dp = l->o->dp,
                         .staged = l->o->staged};
    char path[4096];

    FERRY_TRY(make_folder(path_in(l, "model", path, sizeof path)));
    FERRY_TRY(policy_write_config(&policy_small, path));
    if (l->o->url != NULL) {
        snprintf(l->s.url, sizeof l->s.url, "%s", l->o->url);
        return FERRY_OK;
    }
    FERRY_TRY(server_start(&so, &l->s));
    printf("serving at %s (process %d, %d replicas of %d ranks, %s)\n",
           l->s.url, (int)l->s.pid, (int)l->o->dp, (int)l->o->tp,
           l->o->staged ? "staged" : "in place");
    return FERRY_OK;
}

/* Connects, and sends the first weights: the server has none until then. */
static ferry_status connect_server(loop *l)
{
    history_row first = {0};
    sync_pause pause = !l->o->asynchronous ? SYNC_PAUSE_WAIT
                       : l->o->staged      ? SYNC_PAUSE_NONE
                                           : SYNC_PAUSE_KEEP;
    uint64_t seed = rng_mix(l->o->seed ^ ((uint64_t)l->round << 32));

    FERRY_TRY(sync_open(l->p, l->s.url, pause, &l->sync));
    FERRY_TRY(sync_send(l->sync, l->round, &first));
    if (!l->o->asynchronous)
        return rollout_create(l->s.url, IN_FLIGHT, &l->rollouts);
    FERRY_TRY(pipeline_create(l->s.url, IN_FLIGHT, (size_t)l->o->prompts,
                              (size_t)l->o->group, seed, &l->pipe));
    return pipeline_take(l->pipe, (size_t)l->o->prompts, l->samples);
}

static ferry_status sample_round(loop *l)
{
    size_t size = (size_t)l->o->group;

    memset(l->samples, 0, l->n * sizeof *l->samples);
    for (size_t i = 0; i < l->n; i++) {
        sample *s = &l->samples[i];

        if (i % size == 0)
            task_prompt(&l->random, s->prompt);
        else
            memcpy(s->prompt, l->samples[i - 1].prompt, sizeof s->prompt);
        s->seed = rng_next(&l->random);
    }
    return rollout_run(l->rollouts, l->samples, l->n);
}

static void reward_round(loop *l, history_row *row)
{
    for (size_t i = 0; i < l->n; i++) {
        sample *s = &l->samples[i];
        int32_t *tokens = l->tokens + i * TASK_LENGTH;

        s->reward = task_reward(s->prompt, s->answer, s->n_answer, s->rewards);
        row->reward += s->reward / (double)l->n;
        row->solved += (s->reward == 1.0) / (double)l->n;
        row->tokens += s->n_answer;
        memset(tokens, 0, TASK_LENGTH * sizeof *tokens);
        memcpy(tokens, s->prompt, sizeof s->prompt);
        memcpy(tokens + TASK_PROMPT, s->answer,
               (size_t)s->n_answer * sizeof *tokens);
    }
    grpo_advantages(l->samples, (size_t)l->o->prompts, (size_t)l->o->group,
                    l->o->discount);
}

static void fill_counts(const grpo_counts *c, history_row *row)
{
    row->age_0 = (double)c->ages[0];
    row->age_1 = (double)c->ages[1];
    row->age_2 = (double)c->ages[2];
    row->age_3 = (double)c->ages[3];
    row->weighted = (double)c->weighted;
    row->dropped = (double)c->dropped;
    row->oldest = c->oldest;
    row->newest = c->newest;
    row->ratio = c->weighted > 0 ? c->ratio_sum / (double)c->weighted : 1;
}

/* Compares the answers that version `step` gave with the trainer's own
 * numbers, which stay in logprobs. */
static ferry_status check_version(loop *l, graph *g, int64_t step,
                                  history_row *row)
{
    oracle_report report = {0};

    FERRY_TRY(graph_forward(g, l->tokens, l->n, l->logprobs));
    FERRY_TRY(oracle_check(l->samples, l->n, l->logprobs, policy_small.vocab,
                           (int32_t)step, &report));
    row->checked += (double)report.checked;
    row->drift = fmax(row->drift, report.difference);
    return FERRY_OK;
}

static ferry_status train_round(loop *l, history_row *row)
{
    grpo_options go = {
        .entropy = l->o->entropy, .ratio_max = RATIO_MAX, .age_max = AGE_MAX};
    int32_t vocab = policy_small.vocab;
    grpo_counts counts;
    double loss = 0;

    /* What was in flight during the last update is a version behind. */
    if (l->before != NULL) {
        FERRY_TRY(check_version(l, l->before_g, l->round - 1, row));
        memcpy(l->before->weights, l->p->weights,
               l->p->n_weights * sizeof *l->p->weights);
    }
    FERRY_TRY(check_version(l, l->g, l->round, row));
    grpo_weights(l->samples, l->n, l->logprobs, vocab, (int32_t)l->round, &go,
                 l->coefficients, l->entropies, &counts);
    fill_counts(&counts, row);
    FERRY_TRY(graph_gradient(l->g, l->tokens, l->n, l->coefficients,
                             l->entropies, l->gradient, &loss));
    row->norm = adam_step(l->a, l->p->weights, l->gradient);
    return FERRY_OK;
}

static void print_round(const loop *l, const history_row *r)
{
    char bar[21];

    if (l->o->quiet)
        return;
    for (int i = 0; i < 20; i++)
        bar[i] = i < lround(r->reward * 20) ? '#' : '.';
    bar[20] = '\0';
    printf("round %4.0f  reward %.3f %s  %5.0f tokens/s  sync %5.1f ms  "
           "step-%lld  drift %.0e of %.0f",
           r->round, r->reward, bar, r->tokens / r->round_ms * 1e3, r->sync_ms,
           (long long)(l->o->no_sync ? 0 : l->round), r->drift, r->checked);
    if (r->weighted + r->dropped > 0)
        printf("  off-policy %.0f (dropped %.0f)", r->weighted + r->dropped,
               r->dropped);
    printf("\n");
    fflush(stdout);
}

static ferry_status sync_round(loop *l, history_row *row)
{
    if (l->o->no_sync)
        return FERRY_OK;
    FERRY_TRY(sync_send(l->sync, l->round, row));
    l->sync_total_ms += row->sync_ms;
    if (l->o->spoil >= 0 && l->round == l->o->spoil + 1)
        l->p->weights[l->p->params[l->p->n_params - 1].at] += 0.5f;
    return FERRY_OK;
}

/* Milliseconds since *at, which is set to now. */
static double lap(double *at)
{
    double then = *at;

    *at = now_ms();
    return *at - then;
}

static ferry_status run_round(loop *l)
{
    history_row row = {.round = (double)l->round};
    double start = now_ms(), at = start;

    if (l->pipe == NULL)
        FERRY_TRY(sample_round(l));
    row.rollout_ms = lap(&at);
    reward_round(l, &row);
    FERRY_TRY(train_round(l, &row));
    row.train_ms = lap(&at);
    l->round++;
    /* The next batch is taken before the update, so that the requests that
     * refill the pipeline are in flight while the weights change. */
    if (l->pipe != NULL)
        FERRY_TRY(pipeline_take(l->pipe, (size_t)l->o->prompts, l->samples));
    row.rollout_ms += lap(&at);
    FERRY_TRY(sync_round(l, &row));
    row.round_ms = now_ms() - start;
    FERRY_TRY(history_add(&l->h, &row));
    print_round(l, &row);
    if (l->o->save_every > 0 && l->round % l->o->save_every == 0)
        FERRY_TRY(save(l));
    return FERRY_OK;
}

static bool reached(const loop *l)
{
    return l->o->target > 0 && l->h.n >= REWARD_WINDOW &&
           history_reward(&l->h, REWARD_WINDOW) >= l->o->target;
}

/* How it began: the mean of the first rounds. */
static double first_reward(const loop *l)
{
    history head = {.rows = l->h.rows,
                    .n = l->h.n < REWARD_WINDOW / 2 ? l->h.n
                                                    : REWARD_WINDOW / 2};

    return history_reward(&head, head.n);
}

static bool judge(const loop *l)
{
    double first = first_reward(l);
    double last = history_reward(&l->h, REWARD_WINDOW);
    double wall = now_ms() - l->started_ms;

    printf("rl_loop: reward %.3f -> %.3f, %lld rounds in %.1f s, %.1f %% of "
           "it in sync\n",
           first, last, (long long)(l->round - l->resumed_at), wall * 1e-3,
           100.0 * l->sync_total_ms / wall);
    if (l->o->no_sync) {
        printf("rl_loop: without sync it %s\n",
               last < first + CHANCE_DRIFT ? "does not learn, as it must be"
                                           : "learned, which cannot be");
        return last < first + CHANCE_DRIFT;
    }
    if (l->o->target > 0 && !reached(l)) {
        printf("rl_loop: the target %.3f was not reached\n", l->o->target);
        return false;
    }
    return true;
}

static ferry_status write_page(const loop *l)
{
    char path[4096], note[512];

    if (l->h.n == 0)
        return FERRY_OK;
    snprintf(note, sizeof note,
             "%s, seed %" PRIu64 ", %d prompts with %d answers a round, %d "
             "replicas of %d ranks, %s commit%s. Task: given %d digits, say "
             "them in ascending order.",
             l->o->asynchronous ? "Asynchronous" : "Synchronous", l->o->seed,
             (int)l->o->prompts, (int)l->o->group, (int)l->o->dp, (int)l->o->tp,
             l->o->staged ? "staged" : "in-place",
             l->o->no_sync ? ", no sync after the first (the control)" : "",
             (int)TASK_DIGITS);
    FERRY_TRY(page_write(&l->h, "Reinforcement learning through Ferry", note,
                         path_in(l, "rl_loop.html", path, sizeof path)));
    printf("rl_loop: page %s\n", path);
    return FERRY_OK;
}

static ferry_status run_rounds(loop *l, const volatile sig_atomic_t *stop)
{
    l->started_ms = now_ms();
    l->resumed_at = l->round;
    while (l->round < l->o->rounds && !*stop && !reached(l))
        FERRY_TRY(run_round(l));
    return l->o->save_every > 0 ? save(l) : FERRY_OK;
}

static ferry_status run_all(loop *l, const volatile sig_atomic_t *stop)
{
    FERRY_TRY(make_folder(l->o->folder));
    FERRY_TRY(make_trainer(l));
    FERRY_TRY(make_server(l));
    FERRY_TRY(connect_server(l));
    return run_rounds(l, stop);
}

/* Ends everything, in reverse. */
static ferry_status end(loop *l)
{
    ferry_status st;

    pipeline_destroy(&l->pipe);
    rollout_destroy(&l->rollouts);
    sync_close(&l->sync);
    st = server_stop(&l->s);
    graph_destroy(&l->before_g);
    policy_destroy(&l->before);
    graph_destroy(&l->g);
    adam_destroy(&l->a);
    policy_destroy(&l->p);
    history_free(&l->h);
    free(l->samples);
    free(l->tokens);
    free(l->logprobs);
    free(l->coefficients);
    free(l->entropies);
    free(l->gradient);
    return st;
}

ferry_status loop_run(const options *o, const volatile sig_atomic_t *stop,
                      bool *out_good)
{
    loop l = {.o = o};
    ferry_status st = run_all(&l, stop), ended;

    if (st < 0) /* the line would be lost in the clean-up */
        fprintf(stderr, "rl_loop: round %lld: %s: %s\n", (long long)l.round,
                ferry_status_name(st), ferry_last_error());
    (void)write_page(&l);
    *out_good = st == FERRY_OK && !*stop && judge(&l);
    ended = end(&l);
    if (st == FERRY_OK && ended < 0)
        fprintf(stderr, "rl_loop: %s\n", ferry_last_error());
    return st < 0 ? st : ended;
}
