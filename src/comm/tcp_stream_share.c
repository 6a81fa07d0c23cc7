/* SPDX-License-Identifier: Apache-2.0 */
/* How the ranks of a host come to share a pool. The leader makes it and
 * listens at an abstract Unix socket, whose random name and a random key go
 * to all ranks through the group; a rank that shows the key and is of the
 * same user gets the descriptor. Whoever cannot have it is a host of its
 * own, said aloud.
 *
 * Three all-gathers: 1. card: options, socket, key, status  2. connected, or
 * why not  3. shared, or why not, and the status of a pool of one's own.
 * Request: 1. u32 rank  2. 32 bytes key. Answer: 1. u32 1, with the
 * descriptor, or 0  2. 124 bytes text.
 * Invariant: all ranks agree on who shares with whom. */
#include "comm/tcp_stream.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/socket.h"
#include "comm/tcp_tree.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NAME_BYTES 48
#define LINE_BYTES 160
#define TEXT_BYTES 124
#define STRANGERS  64
/* A rank has sent its request before it says that it is connected. */
#define STRANGER_MS  50
#define REQUEST_SIZE (4 + TCP__POOL_KEY)
#define ANSWER_SIZE  (4 + TEXT_BYTES)
#define CARD_BYTES   (36 + NAME_BYTES + TCP__POOL_KEY + LINE_BYTES)
#define WORD_BYTES   (8 + LINE_BYTES)

typedef struct meeting {
    tcp__stream *s;
    ferry__deadline until;
    int listener;
    char name[NAME_BYTES], key[2 * TCP__POOL_KEY + 1];
    unsigned char *cards, *words; /* of all ranks */
    ferry_status ended; /* by the owner's check, or by news of the group */
} meeting;

static void put_text(unsigned char *p, const char *text, size_t most)
{
    memset(p, 0, most);
    memcpy(p, text, strnlen(text, most - 1));
}

static int64_t left_ms(const meeting *m)
{
    int64_t left = ferry__deadline_left_ms(&m->until);

    return left > 0 ? left : 1;
}

static ferry_status gather(meeting *m, const void *mine, size_t size, void *all)
{
    ferry__comm *c = m->s->base.comm;

    return c->ops->all_gather(c, mine, size, all, left_ms(m));
}

/* What ends a wait for one rank ends the meeting; another failure only makes
 * a host of its own of that rank. */
static ferry_status look(void *arg)
{
    meeting *m = arg;
    const ferry__comm *c = m->s->base.comm;

    if (c->check)
        m->ended = c->check(c->check_arg, "stream: sharing memory");
    if (m->ended >= 0)
        m->ended = ferry__tcp_listen_all(m->s->c, "stream: sharing memory");
    return m->ended;
}

static ferry__waiter waiter_of(meeting *m)
{
    return (ferry__waiter){look, m, m->until, "stream socket"};
}

/* The lowest rank that shares with r, or the root. */
static int32_t leader_of(const tcp__stream *s, int32_t r)
{
    if (s->hosts[r] == s->hosts[s->o.root])
        return s->o.root;
    for (int32_t q = 0; q < r; q++) {
        if (s->hosts[q] == s->hosts[r])
            return q;
    }
    return r;
}

static int32_t count_mates(const tcp__stream *s)
{
    int32_t n = 0;

    for (int32_t r = 0; r < s->base.comm->world_size; r++)
        n += r != s->base.comm->rank &&
             s->hosts[r] == s->hosts[s->base.comm->rank];
    return n;
}

/* ---- 1. cards ---- */

static uint64_t bound_of(const tcp__stream *s)
{
    return (uint64_t)s->o.n_buffers * s->o.buffer_bytes;
}

static ferry_status make_pool(meeting *m)
{
    tcp__stream *s = m->s;
    char random[17];

    FERRY_TRY(ferry__pool_create(&s->pool, bound_of(s), m->key));
    if (count_mates(s) == 0)
        return FERRY_OK;
    FERRY_TRY(ferry__random_hex(random, 8));
    snprintf(m->name, sizeof(m->name), "ferry-stream-%s", random);
    return ferry__unix_listen(m->name, &m->listener);
}

static ferry_status make_card(meeting *m, unsigned char *card)
{
    tcp__stream *s = m->s;
    ferry_status status = ferry__random_hex(m->key, TCP__POOL_KEY / 2);

    if (status >= 0 && ferry__tcp_stream_leads(s))
        status = make_pool(m);
    ferry__write_u32(card, TCP__STREAM_VERSION);
    ferry__write_u32(card + 4, (uint32_t)s->o.root);
    ferry__write_u32(card + 8, (uint32_t)s->o.n_buffers);
    ferry__write_u32(card + 12, (uint32_t)s->o.buffer_bytes);
    ferry__write_u32(card + 16, (uint32_t)(s->o.buffer_bytes >> 32));
    ferry__write_u32(card + 20, (uint32_t)status);
    ferry__write_u32(card + 24, (uint32_t)getpid());
    memset(card + 28, 0, 8);
    put_text(card + 36, m->name, NAME_BYTES);
    memcpy(card + 36 + NAME_BYTES, m->key, TCP__POOL_KEY);
    put_text(card + 36 + NAME_BYTES + TCP__POOL_KEY,
             status < 0 ? ferry_last_error() : "", LINE_BYTES);
    return status;
}

static ferry_status compare(uint32_t theirs, uint32_t mine, const char *what,
                            int32_t rank, int32_t own)
{
    if (theirs == mine)
        return FERRY_OK;
    return ferry_fail(FERRY_EMISMATCH,
                      "stream: %s is %u on rank %d, %u on rank %d", what,
                      theirs, rank, mine, own);
}

static ferry_status check_card(const meeting *m, int32_t r)
{
    static const char *const names[] = {"protocol version", "root", "n_buffers",
                                        "buffer_bytes", "buffer_bytes / 2^32"};
    int32_t own = m->s->base.comm->rank;
    const unsigned char *card = m->cards + (size_t)r * CARD_BYTES;
    const unsigned char *mine = m->cards + (size_t)own * CARD_BYTES;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        FERRY_TRY(compare(ferry__read_u32(card + 4 * i),
                          ferry__read_u32(mine + 4 * i), names[i], r, own));
    if ((ferry_status)ferry__read_u32(card + 20) < 0)
        return ferry_fail((ferry_status)ferry__read_u32(card + 20),
                          "stream: rank %d: %.*s", r, LINE_BYTES - 1,
                          (const char *)card + 36 + NAME_BYTES + TCP__POOL_KEY);
    return FERRY_OK;
}

static ferry_status exchange_cards(meeting *m)
{
    unsigned char card[CARD_BYTES];

    make_card(m, card);
    FERRY_TRY(gather(m, card, sizeof(card), m->cards));
    for (int32_t r = 0; r < m->s->base.comm->world_size; r++) {
        /* The name is used as a text. */
        m->cards[(size_t)r * CARD_BYTES + 36 + NAME_BYTES - 1] = '\0';
        FERRY_TRY(check_card(m, r));
    }
    return FERRY_OK;
}

/* ---- 2. and 3. the words of all ranks ---- */

static ferry_status exchange_words(meeting *m, uint32_t yes,
                                   ferry_status status, const char *line)
{
    unsigned char word[WORD_BYTES];

    ferry__write_u32(word, yes);
    ferry__write_u32(word + 4, (uint32_t)status);
    put_text(word + 8, line, LINE_BYTES);
    FERRY_TRY(gather(m, word, sizeof(word), m->words));
    for (int32_t r = 0; r < m->s->base.comm->world_size; r++) {
        const unsigned char *w = m->words + (size_t)r * WORD_BYTES;
        ferry_status theirs = (ferry_status)ferry__read_u32(w + 4);

        if (theirs < 0)
            return ferry_fail(theirs, "stream: rank %d: %.*s", r,
                              LINE_BYTES - 1, (const char *)w + 8);
    }
    return FERRY_OK;
}

static bool said_yes(const meeting *m, int32_t r)
{
    return ferry__read_u32(m->words + (size_t)r * WORD_BYTES) != 0;
}

/* ---- members ---- */

static ferry_status check_user(int fd, const char *who)
{
    uint32_t uid;
    int32_t pid;

    FERRY_TRY(ferry__unix_peer(fd, &pid, &uid));
    if (uid != (uint32_t)geteuid())
        return ferry_fail(FERRY_EAUTH, "%s is of user %u, this is user %u", who,
                          uid, (uint32_t)geteuid());
    return FERRY_OK;
}

static ferry_status knock(meeting *m, int *out_fd)
{
    const unsigned char *card = m->cards + (size_t)m->s->leader * CARD_BYTES;
    ferry__waiter w = waiter_of(m);
    unsigned char request[REQUEST_SIZE];
    ferry_status status;

    ferry__write_u32(request, (uint32_t)m->s->base.comm->rank);
    memcpy(request + 4, card + 36 + NAME_BYTES, TCP__POOL_KEY);
    FERRY_TRY(ferry__unix_connect((const char *)card + 36, &w, out_fd));
    status = check_user(*out_fd, "the leader");
    if (status >= 0)
        status = ferry__send_all(*out_fd, request, sizeof(request), &w);
    if (status < 0) {
        close(*out_fd);
        *out_fd = -1;
    }
    return status;
}

static ferry_status take_pool(meeting *m, int fd)
{
    const unsigned char *card = m->cards + (size_t)m->s->leader * CARD_BYTES;
    ferry__waiter w = waiter_of(m);
    unsigned char answer[ANSWER_SIZE];
    ferry_status status;
    size_t n = 0;
    int pool = -1;

    FERRY_TRY(ferry__recv_fds(fd, answer, sizeof(answer), &pool, 1, &n, &w));
    answer[sizeof(answer) - 1] = '\0';
    if (ferry__read_u32(answer) != 1 || n != 1) {
        if (n == 1)
            close(pool);
        return ferry_fail(FERRY_EPEER, "refused: %s", (char *)answer + 4);
    }
    status = ferry__pool_map(&m->s->pool, pool,
                             (const char *)card + 36 + NAME_BYTES);
    close(pool);
    return status;
}

/* ---- leaders ---- */

static bool is_mate(const tcp__stream *s, uint32_t r)
{
    return r < (uint32_t)s->base.comm->world_size &&
           (int32_t)r != s->base.comm->rank &&
           s->hosts[r] == s->hosts[s->base.comm->rank];
}

/* Looks at every byte whatever the first ones are. */
static bool key_is_right(const meeting *m, const unsigned char *key)
{
    unsigned char differs = 0;

    for (size_t i = 0; i < TCP__POOL_KEY; i++)
        differs |= (unsigned char)(key[i] ^ (unsigned char)m->key[i]);
    return differs == 0;
}

/* True when it was a rank, whatever it was told. */
static bool answer_one(meeting *m, int fd)
{
    ferry__waiter w = {NULL, NULL, ferry__deadline_in(STRANGER_MS),
                       "stream socket"};
    unsigned char request[REQUEST_SIZE], answer[ANSWER_SIZE] = {0};
    ferry_status status;

    if (ferry__recv_all(fd, request, sizeof(request), &w) < 0 ||
        !key_is_right(m, request + 4) ||
        !is_mate(m->s, ferry__read_u32(request)))
        return false;
    status = check_user(fd, "this rank");
    ferry__write_u32(answer, status >= 0);
    put_text(answer + 4, status < 0 ? ferry_last_error() : "", TEXT_BYTES);
    (void)ferry__send_fds(fd, answer, sizeof(answer), &m->s->pool.fd,
                          status >= 0, &w);
    return true;
}

static ferry_status hand_out(meeting *m)
{
    ferry__waiter w = waiter_of(m);
    int32_t missing = 0, strangers = 0;

    for (int32_t r = 0; r < m->s->base.comm->world_size; r++)
        missing += is_mate(m->s, (uint32_t)r) && said_yes(m, r);
    while (missing > 0 && strangers < STRANGERS) {
        int fd;

        if (ferry__unix_accept(m->listener, &w, &fd) < 0)
            break;
        if (answer_one(m, fd))
            missing--;
        else
            strangers++;
        close(fd);
    }
    /* Who is left without an answer is cut off, and says so itself. */
    if (m->listener >= 0)
        close(m->listener);
    m->listener = -1;
    return m->ended;
}

/* ---- all ---- */

/* Who could not share is a host of its own, and makes its own pool. */
static ferry_status settle(meeting *m, bool shared, const char *why)
{
    tcp__stream *s = m->s;
    ferry_status status = FERRY_OK;

    if (!shared) {
        ferry__pool_close(&s->pool);
        status = ferry__pool_create(&s->pool, bound_of(s), m->key);
    }
    FERRY_TRY(exchange_words(m, shared, status,
                             status < 0 ? ferry_last_error() : why));
    for (int32_t r = 0; r < s->base.comm->world_size; r++) {
        if (said_yes(m, r))
            continue;
        if (r == s->base.comm->rank || s->base.comm->rank == s->o.root)
            ferry__log(FERRY_LOG_WARN,
                       "stream: rank %d cannot share memory with rank %d of "
                       "the same host and is sent its bytes over tcp: %.*s",
                       r, leader_of(s, r), LINE_BYTES - 1,
                       (const char *)m->words + (size_t)r * WORD_BYTES + 8);
    }
    /* Ids of hosts are hashes; these are told apart from all of them. */
    for (int32_t r = 0; r < s->base.comm->world_size; r++) {
        if (said_yes(m, r))
            continue;
        s->hosts[r] = ~(uint64_t)r;
        for (int32_t q = 0; q < s->base.comm->world_size; q++) {
            if (q != r && s->hosts[q] == s->hosts[r])
                return ferry_fail(FERRY_EINTERNAL,
                                  "stream: host id of rank %d is taken", r);
        }
    }
    return FERRY_OK;
}

static ferry_status share(meeting *m)
{
    tcp__stream *s = m->s;
    ferry_status status = FERRY_OK;
    char line[LINE_BYTES] = "";
    int fd = -1;

    FERRY_TRY(exchange_cards(m));
    if (!ferry__tcp_stream_leads(s))
        status = knock(m, &fd);
    FERRY_TRY(m->ended);
    if (status < 0)
        snprintf(line, sizeof(line), "%.150s", ferry_last_error());
    status = exchange_words(m, fd >= 0, FERRY_OK, line);
    if (status >= 0 && ferry__tcp_stream_leads(s)) {
        status = hand_out(m);
    } else if (status >= 0 && fd >= 0 && take_pool(m, fd) < 0) {
        snprintf(line, sizeof(line), "%.150s", ferry_last_error());
        close(fd);
        fd = -1;
        status = m->ended;
    }
    if (status >= 0)
        status = settle(m, ferry__tcp_stream_leads(s) || fd >= 0, line);
    if (fd >= 0)
        close(fd);
    return status;
}

/* The chain of leaders is that of the group's broadcasts. */
static void find_places(tcp__stream *s)
{
    int32_t rank = s->base.comm->rank;
    ferry__tree tree;

    s->leader = leader_of(s, rank);
    s->prev = s->next = -1;
    if (!ferry__tcp_stream_leads(s))
        return;
    ferry__tree_make(rank, s->base.comm->world_size, s->o.root, s->hosts, true,
                     &tree);
    s->prev = tree.parent;
    for (int32_t i = 0; i < tree.n_children; i++) {
        if (s->hosts[tree.children[i]] != s->hosts[rank])
            s->next = tree.children[i];
    }
}

static void count_readers(tcp__stream *s)
{
    tcp__pool *p = &s->pool;

    for (int32_t r = 0; r < s->base.comm->world_size; r++) {
        if (r != s->o.root && s->hosts[r] == s->hosts[s->base.comm->rank])
            p->readers[p->n_readers++] = r;
    }
    if (s->next >= 0)
        p->readers[p->n_readers++] = TCP__POOL_FORWARD;
}

ferry_status ferry__tcp_stream_share(tcp__stream *s)
{
    size_t world = (size_t)s->base.comm->world_size;
    meeting m = {
        .s = s, .until = ferry__deadline_in(s->o.timeout_ms), .listener = -1};
    ferry_status status = FERRY_ENOMEM;

    memcpy(s->hosts, s->c->host_ids, sizeof(s->hosts));
    s->leader = leader_of(s, s->base.comm->rank);
    m.cards = ferry__alloc_array(world, CARD_BYTES);
    m.words = ferry__alloc_array(world, WORD_BYTES);
    if (m.cards && m.words)
        status = share(&m);
    ferry__free(m.cards);
    ferry__free(m.words);
    if (m.listener >= 0)
        close(m.listener);
    FERRY_TRY(status);
    find_places(s);
    count_readers(s);
    return FERRY_OK;
}
