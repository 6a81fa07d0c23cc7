/* SPDX-License-Identifier: Apache-2.0 */
/* What the C parties of `bench broadcast` share: a root with a source, worker
 * processes with memory of their own, and a line protocol with the bench.
 * The root prints "ready", then answers each line it reads: "round" with "ms
 * X", "check" (poison, one round, compare every byte) with "good" or "bad".
 * Invariant: between rounds every process sleeps, so that parties that live
 * at once do not slow each other; nothing of the library is needed here. */
#ifndef FERRY_BENCH_PEERS_PARTY_H
#define FERRY_BENCH_PEERS_PARTY_H

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define PARTY_WORKERS 16
#define PARTY_POISON  0x7f

typedef struct party_tensor {
    char name[128];
    int64_t rows, cols; /* cols 0: one dimension */
    size_t at, size;    /* in the source and in each destination */
} party_tensor;

typedef struct party {
    const char *way; /* the first argument */
    const char *set_path, *source_path, *work;
    int n_workers, rank;                      /* 0: the root */
    const char *hosts[PARTY_WORKERS + 1];     /* namespaces; NULL: this one */
    const char *addresses[PARTY_WORKERS + 1]; /* by rank */
    party_tensor *tensors;
    size_t n_tensors, bytes;
    char *source; /* root, and of workers that may copy from it */
    char *own;    /* a worker's destination */
    int links[PARTY_WORKERS + 1]; /* root: [rank]; worker: [0] */
    double pace_ms;               /* the source takes so long; 0: none */
} party;

typedef void (*party_fn)(party *p, void *arg);

static inline __attribute__((noreturn, format(printf, 1, 2))) void
party_die(const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    fprintf(stderr, "party: ");
    vfprintf(stderr, fmt, args);
    fprintf(stderr, "\n");
    va_end(args);
    _exit(1);
}

static inline double party_now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* ---- arguments, set, memory ---- */

static inline void party_list(char *text, const char **out)
{
    char *save = NULL;
    int n = 0;

    for (char *at = strtok_r(text, ",", &save); at && n <= PARTY_WORKERS;
         at = strtok_r(NULL, ",", &save))
        out[n++] = strcmp(at, "-") == 0 ? NULL : at;
}

static inline void party_set(party *p)
{
    FILE *f = fopen(p->set_path, "r");
    party_tensor t;
    long long rows, cols;

    if (!f)
        party_die("%s: %s", p->set_path, strerror(errno));
    memset(&t, 0, sizeof(t));
    while (fscanf(f, "%127s %lld %lld", t.name, &rows, &cols) == 3) {
        t.rows = rows;
        t.cols = cols;
        t.at = p->bytes;
        t.size = (size_t)rows * (size_t)(cols ? cols : 1) * 2;
        p->tensors = (party_tensor *)realloc(
            p->tensors, (p->n_tensors + 1) * sizeof(*p->tensors));
        p->tensors[p->n_tensors++] = t;
        p->bytes += t.size;
    }
    fclose(f);
}

static inline void party_arguments(party *p, int argc, char **argv)
{
    memset(p, 0, sizeof(*p));
    if (argc < 2)
        party_die("usage: WAY --set FILE --source FILE --workers N "
                  "[--work DIR] [--hosts A,…] [--addresses A,…] [--pace MS]");
    p->way = argv[1];
    p->n_workers = 1;
    for (int i = 0; i <= PARTY_WORKERS; i++)
        p->addresses[i] = "127.0.0.1";
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--set") == 0)
            p->set_path = argv[i + 1];
        else if (strcmp(argv[i], "--source") == 0)
            p->source_path = argv[i + 1];
        else if (strcmp(argv[i], "--work") == 0)
            p->work = argv[i + 1];
        else if (strcmp(argv[i], "--workers") == 0)
            p->n_workers = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--hosts") == 0)
            party_list(argv[i + 1], p->hosts);
        else if (strcmp(argv[i], "--addresses") == 0)
            party_list(argv[i + 1], p->addresses);
        else if (strcmp(argv[i], "--pace") == 0)
            p->pace_ms = atof(argv[i + 1]);
        else
            party_die("unknown argument %s", argv[i]);
    }
    if (p->n_workers < 1 || p->n_workers > PARTY_WORKERS || !p->set_path ||
        !p->source_path)
        party_die("1 to %d workers, a set and a source", PARTY_WORKERS);
    party_set(p);
}

/* Private to this process, but one copy for all parties of a run: the pages
 * of a file in memory that nobody writes. */
static inline void party_open_source(party *p)
{
    int fd = open(p->source_path, O_RDONLY | O_CLOEXEC);

    p->source = (char *)mmap(NULL, p->bytes, PROT_READ,
                             MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (fd < 0 || p->source == MAP_FAILED)
        party_die("%s: %s", p->source_path, strerror(errno));
    close(fd);
}

static inline void party_open_own(party *p)
{
    p->own = (char *)mmap(NULL, p->bytes + 64, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p->own == MAP_FAILED)
        party_die("no memory for %zu bytes", p->bytes);
    memset(p->own, PARTY_POISON, p->bytes);
}

/* Word i of the source, as the bench wrote it. */
static inline uint64_t party_word(uint64_t i)
{
    return (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

static inline int party_is_good(const party *p)
{
    size_t whole = p->bytes / 8;

    for (size_t i = 0; i < whole; i++) {
        uint64_t word = party_word(i);

        if (memcmp(p->own + 8 * i, &word, 8) != 0) {
            fprintf(stderr, "party: %s: rank %d: byte %zu or soon after\n",
                    p->way, p->rank, 8 * i);
            return 0;
        }
    }
    for (size_t i = 8 * whole; i < p->bytes; i++) {
        uint64_t word = party_word(whole);

        if (p->own[i] != ((const char *)&word)[i - 8 * whole])
            return 0;
    }
    return 1;
}

/* Stores that pass by the cache, since the destination is not read soon. */
static inline void party_copy(char *to, const char *from, size_t n)
{
#if defined(__SSE2__)
    size_t i = 0;

    for (; i < n && ((uintptr_t)(to + i) & 15); i++)
        to[i] = from[i];
    for (; i + 64 <= n; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));

        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    _mm_sfence();
    memcpy(to + i, from + i, n - i);
#else
    memcpy(to, from, n);
#endif
}

/* ---- links between the root and its workers ---- */

static inline void party_send(int fd, const void *bytes, size_t n)
{
    const char *at = (const char *)bytes;

    while (n > 0) {
        ssize_t k = send(fd, at, n, MSG_NOSIGNAL);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            party_die("a link broke: %s", strerror(errno));
        at += k;
        n -= (size_t)k;
    }
}

/* 0: the other end is gone. */
static inline int party_recv(int fd, void *bytes, size_t n)
{
    char *at = (char *)bytes;

    while (n > 0) {
        ssize_t k = recv(fd, at, n, 0);

        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return 0;
        at += k;
        n -= (size_t)k;
    }
    return 1;
}

/* Moves this process into a network namespace made by `ip netns`. */
static inline void party_enter(const char *host)
{
    char path[256];
    int fd;

    if (!host)
        return;
    snprintf(path, sizeof(path), "/run/netns/%s", host);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0)
        party_die("namespace %s: %s", host, strerror(errno));
    close(fd);
}

/* Answers the rank: the root's process comes back as 0, each worker's as its
 * own. Nothing that has threads may have been opened before. */
static inline int party_fork(party *p)
{
    pid_t parent = getpid();

    for (int r = 1; r <= p->n_workers; r++) {
        int ends[2];
        pid_t pid;

        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
            party_die("socketpair: %s", strerror(errno));
        pid = fork();
        if (pid < 0)
            party_die("fork: %s", strerror(errno));
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);
            for (int i = 1; i < r; i++)
                close(p->links[i]);
            close(ends[0]);
            p->links[0] = ends[1];
            p->rank = r;
            party_enter(p->hosts[r]);
            return r;
        }
        close(ends[1]);
        p->links[r] = ends[0];
    }
    party_enter(p->hosts[0]);
    return 0;
}

/* For ranks that something else started: they meet at a socket's path. */
static inline void party_meet(party *p)
{
    struct sockaddr_un a;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), rank = p->rank;

    memset(&a, 0, sizeof(a));
    a.sun_family = AF_UNIX;
    snprintf(a.sun_path, sizeof(a.sun_path), "%s/meet", p->work);
    if (rank > 0) {
        double until = party_now_ms() + 30000;

        while (connect(fd, (struct sockaddr *)&a, sizeof(a)) != 0) {
            if (party_now_ms() > until)
                party_die("rank %d does not meet the root", rank);
            usleep(10000);
        }
        party_send(fd, &rank, sizeof(rank));
        p->links[0] = fd;
        return;
    }
    if (bind(fd, (struct sockaddr *)&a, sizeof(a)) != 0 ||
        listen(fd, PARTY_WORKERS) != 0)
        party_die("%s: %s", a.sun_path, strerror(errno));
    for (int i = 0; i < p->n_workers; i++) {
        int one = accept4(fd, NULL, NULL, SOCK_CLOEXEC);

        if (one < 0 || !party_recv(one, &rank, sizeof(rank)) || rank < 1 ||
            rank > p->n_workers)
            party_die("a rank did not meet the root");
        p->links[rank] = one;
    }
    close(fd);
}

/* ---- rounds ---- */

/* Until the root closes the link. */
static inline void party_work(party *p, party_fn round, void *arg)
{
    char what;

    while (party_recv(p->links[0], &what, 1)) {
        if (what == 'r')
            round(p, arg);
        else if (what == 'p')
            memset(p->own, PARTY_POISON, p->bytes);
        else if (what == 'c' && !party_is_good(p))
            what = 'b';
        party_send(p->links[0], &what, 1);
    }
}

static inline void party_tell(const party *p, char what)
{
    for (int r = 1; r <= p->n_workers; r++)
        party_send(p->links[r], &what, 1);
}

static inline int party_all(const party *p, char what)
{
    int good = 1;

    for (int r = 1; r <= p->n_workers; r++) {
        char got;

        if (!party_recv(p->links[r], &got, 1))
            party_die("%s: worker %d is gone", p->way, r);
        good &= got == what;
    }
    return good;
}

/* From the first word to the workers until each has said that every byte is
 * in its own memory. */
static inline double party_round(party *p, party_fn round, void *arg)
{
    double began = party_now_ms();

    party_tell(p, 'r');
    round(p, arg);
    party_all(p, 'r');
    return party_now_ms() - began;
}

static inline int party_check(party *p, party_fn round, void *arg)
{
    party_tell(p, 'p');
    party_all(p, 'p');
    party_round(p, round, arg);
    party_tell(p, 'c');
    return party_all(p, 'c');
}

static inline void party_lead(party *p, party_fn round, void *arg)
{
    char line[64];

    party_round(p, round, arg);
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        if (strncmp(line, "round", 5) == 0)
            printf("ms %.4f\n", party_round(p, round, arg));
        else if (strncmp(line, "check", 5) == 0)
            printf("%s\n", party_check(p, round, arg) ? "good" : "bad");
        fflush(stdout);
    }
    for (int r = 1; r <= p->n_workers; r++)
        close(p->links[r]);
}

#endif
