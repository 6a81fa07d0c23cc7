/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank puts into the store: the text "<protocol version> ", its card,
 * a blank and 64 hexadecimal digits that prove who wrote the card.
 * Invariant: whoever can write the store without knowing the group's secret
 * can make a meeting fail, and put no card of its own in the place of one. */
#ifndef FERRY_COMM_RENDEZVOUS_CARD_H
#define FERRY_COMM_RENDEZVOUS_CARD_H

#include "base/str.h"
#include "comm/rendezvous.h"

/* Appends what this rank puts down for its card. */
ferry_status ferry__card_seal(const ferry__rendezvous *r, const void *card,
                              size_t card_bytes, ferry__str *out);
/* Takes the card out of what rank `rank` put down, in place, NUL terminated.
 * FERRY_EVERSION names both versions; FERRY_EAUTH: who wrote it does not know
 * the secret, or wrote it for another rank or generation. */
ferry_status ferry__card_open(const ferry__rendezvous *r, int32_t rank,
                              void *value, size_t *size_bytes);
/* The card in an unchecked value, to name who wrote it: never believed. */
void ferry__card_peek(const void *value, size_t size_bytes, char *out,
                      size_t out_bytes);

#endif
