/* SPDX-License-Identifier: Apache-2.0 */
/* Two inner sources for the tests of adapters: tensors in memory, and a
 * stream that reuses one buffer, fills it only when its event is awaited and
 * holds only some names; and values known in f32 and bf16. */
#ifndef TESTS_HARNESS_SOURCE_STREAM_H
#define TESTS_HARNESS_SOURCE_STREAM_H

#include "harness/source_pass.h"

typedef struct source_stream {
    const expected_param *params; /* what it yields; NULL bytes: not held */
    ferry_param_meta meta[16];
    size_t declared, yielded, position;
    unsigned char *buffer;
    bool filled, late; /* late: the event comes at the second asking */
    int asked;
    size_t group_lengths[2];
    bool opened;
} source_stream;

/* The source is part of `s`; at most 16 parameters. */
ferry_source stream_of(source_stream *s, const expected_param *params,
                       size_t count);
ferry_source module_of(const expected_param *params, size_t count);
bool is_stable(const ferry_source *source);

/* 0, 1, … 11, and the same in bfloat16. */
extern const float f32_values[12];
extern const uint16_t bf16_values[12];
/* Four parameters over them; the last is an int64 scalar. */
extern const expected_param plain_params[4];

#endif
