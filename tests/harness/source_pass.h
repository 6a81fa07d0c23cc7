/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of sources share: expected parameters, a pass compared with
 * them byte by byte, and files in the test's own folder. The strides of a
 * tensor are walked here, not by the library. */
#ifndef TESTS_HARNESS_SOURCE_PASS_H
#define TESTS_HARNESS_SOURCE_PASS_H

#include <ferry/source.h>

typedef struct expected_param {
    const char *name;
    ferry_dtype dtype;
    int32_t ndim;
    int64_t shape[4];
    const void *bytes; /* contiguous; NULL: not held */
} expected_param;

/* Writes the elements of a tensor in row-major order. */
void tensor_gather(const ferry_tensor *t, void *out);

/* Metadata, then one whole pass, both equal to `want`; waits are called. */
void expect_pass(ferry_source *source, const expected_param *want,
                 size_t count);

/* The status of reading a pass to its end or to its first failure. */
ferry_status drive_pass(ferry_source *source);

/* "$TMPDIR/name" in a static buffer (four of them, used in turn). */
const char *test_path(const char *name);
void write_test_file(const char *path, const void *bytes, size_t size_bytes);

/* A safetensors file: length, `header`, then the data. Returns its path. */
const char *write_safetensors(const char *name, const char *header,
                              const void *data, size_t data_bytes);

/* Fails unless the last error holds `text`. */
void expect_error(ferry_status got, ferry_status want, const char *text);

#endif
