/* SPDX-License-Identifier: Apache-2.0 */
/* The command line; see options.h. */
#include "options.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

/* X(id, flag, argument, help): argument "" for a switch. */
#define FLAGS(X)                                                               \
    X(FOLDER, "dir", "DIR", "checkpoint, page and logs [rl_loop.out]")         \
    X(URL, "url", "URL", "a running server, in place of one of our own")       \
    X(FERRY, "ferry", "PATH", "the program [../bin/ferry, else by PATH]")      \
    X(SEED, "seed", "N", "of weights, prompts and sampling [1]")               \
    X(ROUNDS, "rounds", "N", "at most [300]")                                  \
    X(TARGET, "target", "R",                                                   \
      "end when the mean reward of 10 rounds reaches R, and fail when no "     \
      "round does [0: run all rounds]")                                        \
    X(PROMPTS, "prompts", "N", "prompts a round [16]")                         \
    X(GROUP, "group", "N", "answers to each prompt [16]")                      \
    X(TP, "tp", "N", "tensor-parallel ranks of a replica [2]")                 \
    X(DP, "dp", "N", "replicas [2]")                                           \
    X(THREADS, "threads", "N", "of the trainer's passes [1]")                  \
    X(RATE, "rate", "R", "Adam's first step size [0.003]")                     \
    X(ENTROPY, "entropy", "R", "worth of spreading out [0.003]")               \
    X(DISCOUNT, "discount", "R",                                               \
      "what a place is worth to the one before it [0.5]")                      \
    X(SAVE, "save-every", "N", "rounds between checkpoints; 0: none [10]")     \
    X(RESUME, "resume", "", "go on from the checkpoint in DIR, if any")        \
    X(ASYNC, "async", "", "go on sampling through the update (commit staged)") \
    X(COMMIT, "commit", "C",                                                   \
      "inplace or staged [inplace; staged with --async]")                      \
    X(NO_SYNC, "no-sync", "",                                                  \
      "the control: weights leave once, before the first round; it must "      \
      "not learn")                                                             \
    X(SPOIL, "spoil", "N",                                                     \
      "change one weight behind the server's back after round N, to see the "  \
      "oracle find it")                                                        \
    X(SELF_TEST, "self-test", "",                                              \
      "check gradients against finite differences, and end")                   \
    X(QUIET, "quiet", "", "no line a round")                                   \
    X(HELP, "help", "", "show this text")

enum flag_id {
#define FLAG_ID(id, flag, argument, help) FLAG_##id,
    FLAGS(FLAG_ID)
#undef FLAG_ID
};

const char *options_usage(void)
{
    return "usage: rl_loop [options]\n\n"
           "Reinforcement learning of a small policy whose answers come from "
           "`ferry serve`\nand whose weights go there after every step.\n\n"
#define FLAG_LINE(id, flag, argument, help)                                    \
    "  --" flag " " argument "\n        " help "\n"
        FLAGS(FLAG_LINE)
#undef FLAG_LINE
            ;
}

static ferry_status read_integer(const char *flag, const char *text,
                                 long long low, long long high, long long *out)
{
    char *end;
    long long value;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < low ||
        value > high)
        return ferry_fail(FERRY_EINVAL,
                          "--%s takes a number from %lld to %lld, got %s", flag,
                          low, high, text);
    *out = value;
    return FERRY_OK;
}

static ferry_status read_i32(const char *flag, const char *text, int32_t low,
                             int32_t high, int32_t *out)
{
    long long value = 0;

    FERRY_TRY(read_integer(flag, text, low, high, &value));
    *out = (int32_t)value;
    return FERRY_OK;
}

static ferry_status read_real(const char *flag, const char *text, double high,
                              double *out)
{
    char *end;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !(value >= 0 && value <= high))
        return ferry_fail(FERRY_EINVAL,
                          "--%s takes a number from 0 to %g, got %s", flag,
                          high, text);
    *out = value;
    return FERRY_OK;
}

static ferry_status read_seed(const char *text, uint64_t *out)
{
    long long value = 0;

    FERRY_TRY(read_integer("seed", text, 0, INT64_MAX, &value));
    *out = (uint64_t)value;
    return FERRY_OK;
}

static ferry_status read_commit(const char *text, int *out)
{
    if (strcmp(text, "staged") != 0 && strcmp(text, "inplace") != 0)
        return ferry_fail(FERRY_EINVAL,
                          "--commit takes inplace or staged, got %s", text);
    *out = strcmp(text, "staged") == 0;
    return FERRY_OK;
}

static ferry_status read_number(int id, const char *arg, options *o)
{
    switch (id) {
    case FLAG_SEED:
        return read_seed(arg, &o->seed);
    case FLAG_ROUNDS:
        return read_i32("rounds", arg, 1, 1000000, &o->rounds);
    case FLAG_PROMPTS:
        return read_i32("prompts", arg, 1, 4096, &o->prompts);
    case FLAG_GROUP:
        return read_i32("group", arg, 2, 1024, &o->group);
    case FLAG_TP:
        return read_i32("tp", arg, 1, 2, &o->tp);
    case FLAG_DP:
        return read_i32("dp", arg, 1, 16, &o->dp);
    case FLAG_THREADS:
        return read_i32("threads", arg, 1, 64, &o->threads);
    case FLAG_SAVE:
        return read_i32("save-every", arg, 0, 1000000, &o->save_every);
    case FLAG_SPOIL:
        return read_i32("spoil", arg, 0, 1000000, &o->spoil);
    case FLAG_TARGET:
        return read_real("target", arg, 1, &o->target);
    case FLAG_RATE:
        return read_real("rate", arg, 1, &o->rate);
    case FLAG_DISCOUNT:
        return read_real("discount", arg, 1, &o->discount);
    default:
        return read_real("entropy", arg, 1, &o->entropy);
    }
}

static ferry_status read_flag(int id, const char *arg, options *o, int *commit)
{
    switch (id) {
    case FLAG_FOLDER:
        o->folder = arg;
        return FERRY_OK;
    case FLAG_URL:
        o->url = arg;
        return FERRY_OK;
    case FLAG_FERRY:
        o->program = arg;
        return FERRY_OK;
    case FLAG_RESUME:
        o->resume = true;
        return FERRY_OK;
    case FLAG_ASYNC:
        o->asynchronous = true;
        return FERRY_OK;
    case FLAG_NO_SYNC:
        o->no_sync = true;
        return FERRY_OK;
    case FLAG_SELF_TEST:
        o->self_test = true;
        return FERRY_OK;
    case FLAG_QUIET:
        o->quiet = true;
        return FERRY_OK;
    case FLAG_HELP:
        o->help = true;
        return FERRY_OK;
    case FLAG_COMMIT:
        return read_commit(arg, commit);
    default:
        return read_number(id, arg, o);
    }
}

ferry_status options_read(int argc, char **argv, options *out)
{
    static const struct option flags[] = {
#define FLAG_OPTION(id, flag, argument, help)                                  \
    {flag, sizeof(argument) > 1 ? required_argument : no_argument, NULL,       \
     FLAG_##id},
        FLAGS(FLAG_OPTION)
#undef FLAG_OPTION
            {NULL, 0, NULL, 0}};
    options o = {.folder = "rl_loop.out",
                 .seed = 1,
                 .rounds = 300,
                 .prompts = 16,
                 .group = 16,
                 .tp = 2,
                 .dp = 2,
                 .threads = 1,
                 .save_every = 10,
                 .spoil = -1,
                 .rate = 0.003,
                 .entropy = 0.003,
                 .discount = 0.5};
    int id, commit = -1;

    opterr = 0;
    while ((id = getopt_long(argc, argv, ":", flags, NULL)) != -1) {
        if (id == '?')
            return ferry_fail(FERRY_EINVAL, "unknown option %s (see --help)",
                              argv[optind - 1]);
        if (id == ':')
            return ferry_fail(FERRY_EINVAL, "%s takes a value",
                              argv[optind - 1]);
        FERRY_TRY(read_flag(id, optarg, &o, &commit));
    }
    if (optind != argc)
        return ferry_fail(FERRY_EINVAL, "unexpected argument %s (see --help)",
                          argv[optind]);
    o.staged = commit == -1 ? o.asynchronous : commit == 1;
    *out = o;
    return FERRY_OK;
}
