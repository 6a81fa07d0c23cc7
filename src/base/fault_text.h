/* SPDX-License-Identifier: Apache-2.0 */
/* The setting `fault` as text: what both wrappers, of engines and of groups,
 * read alike. Each takes its own items and leaves the other's alone. */
#ifndef FERRY_BASE_FAULT_TEXT_H
#define FERRY_BASE_FAULT_TEXT_H

#include <ferry/status.h>
#include <stdbool.h>

#define FERRY__FAULT_TEXT_BYTES 1024

/* The setting, or, when it is "@FILE", what the file holds now; a file that
 * is not there is no fault. */
ferry_status ferry__fault_text(char out[FERRY__FAULT_TEXT_BYTES]);
/* Whether it is a file, which may change while the process runs. */
bool ferry__fault_is_file(void);
/* The next item of a list by commas, blanks or lines, from *at on, which
 * moves past it; false at the end. */
bool ferry__fault_item(const char **at, const char **out_item, size_t *out_n);
/* Whether an item is a rule for groups ("comm:…"). */
bool ferry__fault_is_comm(const char *item, size_t n);
bool ferry__fault_number(const char *text, size_t n, uint64_t *out);
/* "5ms", "2s" or a bare number of milliseconds, at most a day. */
bool ferry__fault_time(const char *text, size_t n, int64_t *out_ms);
bool ferry__fault_is_word(const char *text, size_t n, const char *word);
/* A fixed scramble of 64 bits: what a seed chooses. */
uint64_t ferry__fault_mix(uint64_t x);
/* Flips the bit of the byte at place `at` that the seed chooses. */
void ferry__fault_flip(uint64_t seed, uint64_t at, unsigned char *byte);

#endif
