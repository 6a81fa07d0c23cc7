/* SPDX-License-Identifier: Apache-2.0 */
/* The messages by which two ranks prove themselves: their exact bytes, and
 * what must not pass for a proof. */
#include "comm/tcp_proof.h"

#include "base/bytes.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define NONCE_AT 40
#define PROOF_AT 72

static const tcp__identity caller = {
    .rank = 2, .world_size = 3, .generation = 7, .secret = "secret"};
static const tcp__identity called = {
    .rank = 0, .world_size = 3, .generation = 7, .secret = "secret"};

typedef struct exchange {
    tcp__proof caller, called;
    tcp__proof_message hello, challenge, proof, welcome;
} exchange;

/* The first two messages. */
static void begin(exchange *x)
{
    assert_int_equal(ferry__tcp_proof_call(&x->caller, 0, 1), FERRY_OK);
    assert_int_equal(
        ferry__tcp_proof_write(&x->caller, &caller, TCP__HELLO, x->hello),
        FERRY_OK);
    assert_int_equal(ferry__tcp_proof_answer(&x->called, &called, x->hello),
                     FERRY_OK);
    assert_int_equal(x->called.peer, 2);
    assert_int_equal(x->called.channel, 1);
    assert_int_equal(ferry__tcp_proof_write(&x->called, &called, TCP__CHALLENGE,
                                            x->challenge),
                     FERRY_OK);
    assert_int_equal(ferry__tcp_proof_read(&x->caller, &caller, TCP__CHALLENGE,
                                           x->challenge),
                     FERRY_OK);
    assert_int_equal(
        ferry__tcp_proof_write(&x->caller, &caller, TCP__PROOF, x->proof),
        FERRY_OK);
    assert_int_equal(
        ferry__tcp_proof_write(&x->called, &called, TCP__WELCOME, x->welcome),
        FERRY_OK);
}

static void both_ends_prove_themselves(void **state)
{
    exchange x;

    (void)state;
    begin(&x);
    assert_int_equal(
        ferry__tcp_proof_read(&x.called, &called, TCP__PROOF, x.proof),
        FERRY_OK);
    assert_int_equal(
        ferry__tcp_proof_read(&x.caller, &caller, TCP__WELCOME, x.welcome),
        FERRY_OK);
    assert_null(memmem(&x, sizeof(x), "secret", 6));
}

static void assert_hex(const unsigned char *bytes, size_t n, const char *want)
{
    char hex[256];

    for (size_t i = 0; i < n; i++)
        snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
    assert_string_equal(hex, want);
}

/* As docs/protocol.md has them; the proofs were made by another program. */
static void golden_bytes(void **state)
{
    exchange x;

    (void)state;
    begin(&x);
    for (unsigned char i = 0; i < TCP__NONCE_BYTES; i++) {
        x.caller.mine[i] = x.called.theirs[i] = i;
        x.called.mine[i] = x.caller.theirs[i] = (unsigned char)(32 + i);
    }
    ferry__tcp_proof_write(&x.caller, &caller, TCP__HELLO, x.hello);
    assert_hex(x.hello, NONCE_AT + 4,
               "465443500200000007000000000000000300000002000000000000000100000"
               "0010000000000000000010203");
    assert_hex(x.hello + PROOF_AT, 32,
               "00000000000000000000000000000000000000000000000000000000000000"
               "00");
    ferry__tcp_proof_write(&x.called, &called, TCP__CHALLENGE, x.challenge);
    assert_hex(x.challenge, NONCE_AT + 4,
               "465443500200000007000000000000000300000000000000020000000100000"
               "0020000000000000020212223");
    ferry__tcp_proof_write(&x.caller, &caller, TCP__PROOF, x.proof);
    assert_hex(
        x.proof + PROOF_AT, 32,
        "6580cb88218a3f7d4c75007387061b37a02b048bcb75a630db34d2a55aee6b95");
    ferry__tcp_proof_write(&x.called, &called, TCP__WELCOME, x.welcome);
    assert_hex(
        x.welcome + PROOF_AT, 32,
        "9738e7f0136c94ba0f5900e37dd984de6fcf73d20c440577e09925b9622cf3c9");
    ferry__tcp_proof_refuse(x.hello, "no");
    assert_hex(x.hello, 12, "464e4f21000000006e6f0000");
}

static void assert_no_proof(tcp__proof *p, const tcp__identity *id,
                            uint32_t step, const tcp__proof_message m)
{
    assert_int_equal(ferry__tcp_proof_read(p, id, step, m), FERRY_EAUTH);
    assert_string_equal(ferry_last_error(), "the secret is wrong");
}

static void another_secret_is_no_proof(void **state)
{
    tcp__identity other = called;
    exchange x;

    (void)state;
    begin(&x);
    snprintf(other.secret, sizeof(other.secret), "secres");
    assert_no_proof(&x.called, &other, TCP__PROOF, x.proof);
    snprintf(other.secret, sizeof(other.secret), "secre");
    assert_no_proof(&x.called, &other, TCP__PROOF, x.proof);
    for (size_t i = PROOF_AT; i < TCP__PROOF_BYTES; i++) {
        x.proof[i] ^= 1;
        assert_no_proof(&x.called, &called, TCP__PROOF, x.proof);
        x.proof[i] ^= 1;
    }
    assert_int_equal(
        ferry__tcp_proof_read(&x.called, &called, TCP__PROOF, x.proof),
        FERRY_OK);
}

/* All that was ever said on one connection is of no use on the next. */
static void replayed_transcript_is_no_proof(void **state)
{
    exchange x, y;

    (void)state;
    begin(&x);
    begin(&y);
    assert_int_equal(ferry__tcp_proof_answer(&y.called, &called, x.hello),
                     FERRY_OK);
    assert_no_proof(&y.called, &called, TCP__PROOF, x.proof);
    assert_int_equal(
        ferry__tcp_proof_read(&y.caller, &caller, TCP__CHALLENGE, x.challenge),
        FERRY_OK);
    assert_no_proof(&y.caller, &caller, TCP__WELCOME, x.welcome);
}

/* What this end says, sent back to it as the other end's. */
static void reflected_proof_is_none(void **state)
{
    tcp__proof_message m;
    exchange x;

    (void)state;
    begin(&x);
    memcpy(m, x.hello, sizeof(m));
    ferry__write_u32(m + 20, 0);
    ferry__write_u32(m + 24, 2);
    ferry__write_u32(m + 32, TCP__CHALLENGE);
    assert_int_equal(
        ferry__tcp_proof_read(&x.caller, &caller, TCP__CHALLENGE, m), FERRY_OK);
    assert_int_equal(ferry__tcp_proof_write(&x.caller, &caller, TCP__PROOF, m),
                     FERRY_OK);
    ferry__write_u32(m + 20, 0);
    ferry__write_u32(m + 24, 2);
    ferry__write_u32(m + 32, TCP__WELCOME);
    assert_no_proof(&x.caller, &caller, TCP__WELCOME, m);
}

/* A proof for one rank, channel, world or generation is none for another,
 * though the message says the right ones. */
static void proof_is_bound_to_its_place(void **state)
{
    static const size_t fields[] = {8, 16, 20, 28};
    tcp__identity other;
    exchange x;

    (void)state;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        begin(&x);
        other = called;
        ferry__write_u32(x.proof + fields[i], 1);
        if (fields[i] == 8)
            other.generation = 1;
        else if (fields[i] == 16)
            other.world_size = 1;
        else if (fields[i] == 20)
            x.called.peer = 1;
        else
            x.called.channel = 0, ferry__write_u32(x.proof + 28, 0);
        assert_no_proof(&x.called, &other, TCP__PROOF, x.proof);
    }
}

static void refuse_hello(size_t at, uint32_t value, ferry_status want,
                         const char *text)
{
    exchange x;

    begin(&x);
    ferry__write_u32(x.hello + at, value);
    assert_int_equal(ferry__tcp_proof_answer(&x.called, &called, x.hello),
                     want);
    assert_string_equal(ferry_last_error(), text);
}

static void wrong_hellos_are_named(void **state)
{
    (void)state;
    refuse_hello(0, 1, FERRY_EPEER, "it does not speak the protocol");
    refuse_hello(4, 1, FERRY_EVERSION, "protocol version 1, this is 2");
    refuse_hello(4, 3, FERRY_EVERSION, "protocol version 3, this is 2");
    refuse_hello(8, 8, FERRY_EMISMATCH, "generation 8, this is 7");
    refuse_hello(12, 1, FERRY_EMISMATCH, "generation 4294967303, this is 7");
    refuse_hello(16, 4, FERRY_EMISMATCH, "world size 4, this is 3");
    refuse_hello(20, 0, FERRY_EMISMATCH, "rank 0 calls rank 0 of 3");
    refuse_hello(20, 3, FERRY_EMISMATCH, "rank 3 calls rank 0 of 3");
    refuse_hello(20, UINT32_MAX, FERRY_EMISMATCH,
                 "rank 4294967295 calls rank 0 of 3");
    refuse_hello(24, 1, FERRY_EMISMATCH, "it looks for rank 1, this is 0");
    refuse_hello(32, TCP__PROOF, FERRY_EPEER, "step 3 of the proof, not 1");
}

static void another_rank_may_not_answer(void **state)
{
    exchange x;

    (void)state;
    begin(&x);
    ferry__write_u32(x.welcome + 20, 1);
    assert_int_equal(
        ferry__tcp_proof_read(&x.caller, &caller, TCP__WELCOME, x.welcome),
        FERRY_EMISMATCH);
    assert_string_equal(ferry_last_error(),
                        "it is rank 1 on channel 1, not rank 0 on 1");
    ferry__write_u32(x.welcome + 20, 0);
    ferry__write_u32(x.welcome + 28, 2);
    assert_int_equal(
        ferry__tcp_proof_read(&x.caller, &caller, TCP__WELCOME, x.welcome),
        FERRY_EMISMATCH);
}

static void refusals_are_read_with_a_bound(void **state)
{
    char text[300];
    exchange x;

    (void)state;
    begin(&x);
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    ferry__tcp_proof_refuse(x.welcome, text);
    assert_true(ferry__tcp_proof_is_refusal(x.welcome));
    memset(x.welcome + 8, 'y', TCP__PROOF_BYTES - 8);
    assert_int_equal(
        ferry__tcp_proof_read(&x.caller, &caller, TCP__WELCOME, x.welcome),
        FERRY_EPEER);
    assert_int_equal(strlen(ferry_last_error()), TCP__PROOF_BYTES - 9);
    assert_true(ferry__tcp_proof_is_foreign((const void *)"GET ", 4));
    assert_false(ferry__tcp_proof_is_foreign((const void *)"GET", 3));
    assert_false(ferry__tcp_proof_is_foreign((const void *)"FTCP", 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_ends_prove_themselves),
        cmocka_unit_test(golden_bytes),
        cmocka_unit_test(another_secret_is_no_proof),
        cmocka_unit_test(replayed_transcript_is_no_proof),
        cmocka_unit_test(reflected_proof_is_none),
        cmocka_unit_test(proof_is_bound_to_its_place),
        cmocka_unit_test(wrong_hellos_are_named),
        cmocka_unit_test(another_rank_may_not_answer),
        cmocka_unit_test(refusals_are_read_with_a_bound),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
