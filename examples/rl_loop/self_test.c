/* SPDX-License-Identifier: Apache-2.0 */
/* Is the gradient the loss's slope? See self_test.h. */
#include "self_test.h"

#include "checkpoint.h"
#include "graph.h"
#include "task.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SEQS = 70, /* more than one slice, and not whole ones */
    LENGTH = TASK_LENGTH,
    POSITIONS = SEQS * LENGTH
};

typedef struct probe {
    policy *p;
    graph *g;
    int32_t tokens[POSITIONS];
    float coefficients[POSITIONS], entropies[POSITIONS];
    float *gradient, *scratch;
} probe;

static ferry_status loss_at(probe *t, float *weight, float value, double *out)
{
    *weight = value;
    return graph_gradient(t->g, t->tokens, SEQS, t->coefficients, t->entropies,
                          t->scratch, out);
}

static ferry_status check_param(probe *t, const policy_param *param,
                                rng *random)
{
    const float step = 1e-2f;
    size_t at = param->at + (size_t)rng_below(random, (int32_t)param->count);
    float *weight = t->p->weights + at, kept = *weight;
    double up = 0, down = 0, slope, given = (double)t->gradient[at];

    FERRY_TRY(loss_at(t, weight, kept + step, &up));
    FERRY_TRY(loss_at(t, weight, kept - step, &down));
    *weight = kept;
    slope = (up - down) / (2.0 * (double)step);
    if (!(fabs(slope - given) <= 2e-2 + 1e-2 * fabs(slope)))
        return ferry_fail(FERRY_EINTERNAL,
                          "%s: gradient %g, finite difference %g", param->name,
                          given, slope);
    printf("gradient %-48s %10.4f %10.4f\n", param->name, given, slope);
    return FERRY_OK;
}

static ferry_status check_gradients(probe *t, rng *random)
{
    size_t head = t->p->params[t->p->n_params - 1].at;
    double loss = 0;

    /* The head starts small, which would leave the rest nearly flat. */
    for (size_t i = 0; i < t->p->params[t->p->n_params - 1].count; i++)
        t->p->weights[head + i] *= 10.0f;
    for (size_t i = 0; i < POSITIONS; i++) {
        t->tokens[i] = rng_below(random, t->p->config.vocab);
        t->coefficients[i] = (float)rng_normal(random);
        t->entropies[i] = (float)rng_uniform(random);
    }
    FERRY_TRY(graph_gradient(t->g, t->tokens, SEQS, t->coefficients,
                             t->entropies, t->gradient, &loss));
    for (size_t i = 0; i < t->p->n_params; i++)
        FERRY_TRY(check_param(t, &t->p->params[i], random));
    return FERRY_OK;
}

static ferry_status compare(const checkpoint *a, const checkpoint *b)
{
    size_t bytes = a->a->n * sizeof(float);

    for (size_t i = 0; i < a->p->n_params; i++) {
        const policy_param *param = &a->p->params[i];

        if (memcmp(a->p->weights + param->at, b->p->weights + param->at,
                   param->count * sizeof(float)) != 0)
            return ferry_fail(FERRY_EINTERNAL, "checkpoint: %s differs",
                              param->name);
    }
    if (memcmp(a->a->mean, b->a->mean, bytes) != 0 ||
        memcmp(a->a->square, b->a->square, bytes) != 0 ||
        a->a->steps != b->a->steps || a->round != b->round ||
        a->random->state != b->random->state || a->h->n != b->h->n ||
        memcmp(a->h->rows, b->h->rows, a->h->n * sizeof *a->h->rows) != 0)
        return ferry_fail(FERRY_EINTERNAL, "checkpoint: state differs");
    return FERRY_OK;
}

static ferry_status round_trip(checkpoint *saved, checkpoint *loaded,
                               const char *folder)
{
    history_row row = {.round = 41, .reward = 0.5};
    char path[4096];
    ferry_status st;

    snprintf(path, sizeof path, "%s/self_test.safetensors", folder);
    for (size_t i = 0; i < saved->a->n; i++) {
        saved->a->mean[i] = (float)rng_normal(saved->random);
        saved->a->square[i] = (float)rng_uniform(saved->random);
    }
    saved->a->steps = 42;
    FERRY_TRY(history_add(saved->h, &row));
    FERRY_TRY(checkpoint_save(saved, path));
    st = checkpoint_load(loaded, path);
    if (st == FERRY_OK)
        st = compare(saved, loaded);
    loaded->seed++;
    if (st == FERRY_OK && checkpoint_load(loaded, path) != FERRY_EMISMATCH)
        st = ferry_fail(FERRY_EINTERNAL, "checkpoint: another seed's taken");
    unlink(path);
    return st;
}

static ferry_status check_checkpoint(policy *p, const char *folder)
{
    history h1 = {0}, h2 = {0};
    rng r1 = {11}, r2 = {12};
    checkpoint saved = {
        .p = p, .h = &h1, .random = &r1, .seed = 7, .round = 42};
    checkpoint loaded = {.h = &h2, .random = &r2, .seed = 7};
    ferry_status st = policy_create(&p->config, &r2, &loaded.p);

    if (st == FERRY_OK)
        st = adam_create(p->n_weights, 0.1, &saved.a);
    if (st == FERRY_OK)
        st = adam_create(p->n_weights, 0.1, &loaded.a);
    if (st == FERRY_OK)
        st = round_trip(&saved, &loaded, folder);
    if (st == FERRY_OK)
        printf("checkpoint comes back whole\n");
    adam_destroy(&saved.a);
    adam_destroy(&loaded.a);
    policy_destroy(&loaded.p);
    history_free(&h1);
    history_free(&h2);
    return st;
}

ferry_status self_test(const char *folder)
{
    rng random = {3};
    probe *t = calloc(1, sizeof *t);
    ferry_status st;

    if (t == NULL)
        return ferry_fail(FERRY_ENOMEM, "self-test: out of memory");
    st = policy_create(&policy_small, &random, &t->p);
    if (st == FERRY_OK)
        st = graph_create(t->p, LENGTH, 1, &t->g);
    if (st == FERRY_OK) {
        t->gradient = calloc(t->p->n_weights, sizeof(float));
        t->scratch = calloc(t->p->n_weights, sizeof(float));
        st = t->gradient != NULL && t->scratch != NULL
                 ? check_gradients(t, &random)
                 : ferry_fail(FERRY_ENOMEM, "self-test: out of memory");
    }
    if (st == FERRY_OK)
        st = check_checkpoint(t->p, folder);
    free(t->gradient);
    free(t->scratch);
    graph_destroy(&t->g);
    policy_destroy(&t->p);
    free(t);
    return st;
}
