/* SPDX-License-Identifier: Apache-2.0 */
/* Safetensors files, single and sharded (B6): the test writes every byte
 * itself, right and wrong. */
#include "base/alloc.h"
#include "harness/source_pass.h"
#include "sources/safetensors_format.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Two tensors in 16 bytes, padded so that the data is aligned. */
#define TWO                                                                    \
    "{\"__metadata__\":{\"format\":\"pt\"},"                                   \
    "\"b\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[4,16]},"         \
    "\"a\":{\"dtype\":\"BF16\",\"shape\":[1,2],\"data_offsets\":[0,4]}}"

static const unsigned char data[64] = {
    1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16,
    17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48,
    49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64};

static const expected_param two[2] = {
    {"a", FERRY_DTYPE_BF16, 2, {1, 2}, data},
    {"b", FERRY_DTYPE_F32, 1, {3}, data + 4},
};

/* Spaces after the header are legal and align the data. */
static const char *padded(const char *header)
{
    static char text[2048];

    assert_true(strlen(header) + 9 < sizeof(text));
    strcpy(text, header);
    while (strlen(text) % 8 != 0)
        strcat(text, " ");
    return text;
}

static void remove_files(const char *const *names)
{
    for (; *names; names++)
        remove(test_path(*names));
}

static void b6_single_file_in_the_order_of_its_bytes(void **state)
{
    const char *path =
        write_safetensors("two.safetensors", padded(TWO), data, 16);
    ferry_source source = {0};

    (void)state;
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    assert_true(source.ops->flags & FERRY_SOURCE_STABLE);
    for (int pass = 0; pass < 3; pass++)
        expect_pass(&source, two, 2);
    ferry_source_close(&source);
    assert_int_equal(ferry_source_open(path, &source), FERRY_OK);
    expect_pass(&source, two, 2);
    ferry_source_close(&source);
    remove(path);
}

static void b6_every_dtype_scalars_and_empty_shapes(void **state)
{
    static const struct {
        const char *text;
        ferry_dtype dtype;
        int bytes;
    } rows[] = {
        {"F64", FERRY_DTYPE_F64, 8},
        {"I64", FERRY_DTYPE_I64, 8},
        {"U64", FERRY_DTYPE_U64, 8},
        {"F32", FERRY_DTYPE_F32, 4},
        {"I32", FERRY_DTYPE_I32, 4},
        {"U32", FERRY_DTYPE_U32, 4},
        {"F16", FERRY_DTYPE_F16, 2},
        {"BF16", FERRY_DTYPE_BF16, 2},
        {"I16", FERRY_DTYPE_I16, 2},
        {"U16", FERRY_DTYPE_U16, 2},
        {"I8", FERRY_DTYPE_I8, 1},
        {"U8", FERRY_DTYPE_U8, 1},
        {"BOOL", FERRY_DTYPE_BOOL, 1},
        {"F8_E4M3", FERRY_DTYPE_F8_E4M3, 1},
        {"F8_E5M2", FERRY_DTYPE_F8_E5M2, 1},
    };
    enum { N = sizeof(rows) / sizeof(rows[0]) };
    expected_param want[N + 1];
    char header[2048] = "{", *path;
    ferry_source source = {0};
    int at = 0;

    (void)state;
    for (int i = 0; i < N; i++) {
        sprintf(header + strlen(header),
                "\"%s\":{\"dtype\":\"%s\",\"shape\":[],"
                "\"data_offsets\":[%d,%d]},",
                rows[i].text, rows[i].text, at, at + rows[i].bytes);
        want[i] =
            (expected_param){rows[i].text, rows[i].dtype, 0, {0}, data + at};
        at += rows[i].bytes;
    }
    sprintf(header + strlen(header),
            "\"none\":{\"dtype\":\"U8\",\"shape\":[0,4],"
            "\"data_offsets\":[%d,%d]}}",
            at, at);
    want[N] = (expected_param){"none", FERRY_DTYPE_U8, 2, {0, 4}, data};
    path = strdup(
        write_safetensors("all.safetensors", padded(header), data, (size_t)at));
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    expect_pass(&source, want, N + 1);
    ferry_source_close(&source);
    remove(path);
    free(path);
}

/* Data that is not aligned for its dtype is given aligned, one at a time. */
static void b6_unaligned_data(void **state)
{
    const char *odd = TWO;
    char header[512];
    const char *path;
    ferry_source source = {0};
    ferry_item item;

    (void)state;
    strcpy(header, odd);
    while ((strlen(header) + 8) % 2 == 0)
        strcat(header, " ");
    path = write_safetensors("odd.safetensors", header, data, 16);
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    assert_false(source.ops->flags & FERRY_SOURCE_STABLE);
    expect_pass(&source, two, 2);
    assert_int_equal(source.ops->begin(source.self), FERRY_OK);
    assert_int_equal(source.ops->next(source.self, &item), FERRY_OK);
    assert_int_equal((uintptr_t)item.tensor.data % 2, 0);
    ferry_source_close(&source);
    remove(path);
}

static void b6_no_tensors_at_all(void **state)
{
    const char *path = write_safetensors("none.safetensors", "{}", NULL, 0);
    ferry_source source = {0};

    (void)state;
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    expect_pass(&source, NULL, 0);
    ferry_source_close(&source);
    remove(path);
}

#define ENTRY(dtype, shape, offsets)                                           \
    "{\"w\":{\"dtype\":" dtype ",\"shape\":" shape                             \
    ",\"data_offsets\":" offsets "}}"

static void malformed_headers_are_named(void **state)
{
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *text;
    } cases[] = {
        {"[1]", 0, "not a JSON object"},
        {"{\"w\":", 0, "header"},
        {"{\"w\":1}", 0, "parameter w: not an object"},
        {"{\"__metadata__\":1}", 0, "__metadata__ is not an object"},
        {ENTRY("\"F4\"", "[2]", "[0,8]"), 8,
         "parameter w: unknown dtype \"F4\""},
        {ENTRY("7", "[2]", "[0,8]"), 8, "parameter w: dtype is missing"},
        {"{\"w\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
         "parameter w: dtype is missing"},
        {ENTRY("\"F32\"", "2", "[0,8]"), 8,
         "parameter w: shape is missing or no list"},
        {ENTRY("\"F32\"", "[-2]", "[0,8]"), 8, "parameter w: shape[0]"},
        {ENTRY("\"F32\"", "[1,2.0]", "[0,8]"), 8, "parameter w: shape[1]"},
        {ENTRY("\"U8\"", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1,
         "parameter w: 9 dimensions"},
        {ENTRY("\"F32\"", "[4611686018427387904,4]", "[0,8]"), 8,
         "parameter w: the size of its shape"},
        {ENTRY("\"F32\"", "[2]", "[0]"), 8, "parameter w: data_offsets"},
        {ENTRY("\"F32\"", "[2]", "[0,8,9]"), 8, "parameter w: data_offsets"},
        {ENTRY("\"F32\"", "[2]", "[-8,0]"), 8, "parameter w: data_offsets"},
        {ENTRY("\"F32\"", "[2]", "[0,\"8\"]"), 8, "parameter w: data_offsets"},
        {ENTRY("\"F32\"", "[2]", "[8,0]"), 8,
         "parameter w: begins at byte 8 and ends at byte 0"},
        {ENTRY("\"F32\"", "[2]", "[0,8]"), 7,
         "parameter w: ends at byte 8, the file has 7 bytes of data"},
        {ENTRY("\"F32\"", "[3]", "[0,8]"), 8,
         "parameter w: shape and dtype need 12 bytes, data_offsets span 8"},
        {ENTRY("\"F32\"", "[2]", "[0,8]"), 9,
         "9 bytes of data, the header declares 8"},
        {ENTRY("\"F32\"", "[2]", "[4,12]"), 12,
         "parameter w: begins at byte 4, bytes from 0 belong to nothing"},
        {"{\"v\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[3,7]}}",
         7, "parameter w: begins at byte 3, inside v, which ends at byte 4"},
        {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
         2, "header"},
        {"{\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "empty"},
    };
    ferry_source source = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *path = write_safetensors("bad.safetensors", cases[i].header,
                                             data, cases[i].data_bytes);

        expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                     cases[i].text);
        assert_non_null(strstr(ferry_last_error(), "bad.safetensors"));
        assert_null(source.ops);
        remove(path);
    }
}

/* Any other file: the "header" is whatever its first bytes read as. */
static void what_is_no_safetensors_file_is_said_to_be_none(void **state)
{
    const char *path = test_path("read.me");
    ferry_source source = {0};

    (void)state;
    write_test_file(path, "# Ferry, a carrier", 18);
    expect_error(ferry_source_open(path, &source), FERRY_EINVAL,
                 "is no safetensors file: its first 8 bytes would mean a "
                 "header of 3204718445501751331 bytes, the file has 18");
    assert_non_null(strstr(ferry_last_error(), "read.me"));
    remove(path);
}

static void malformed_lengths_are_named(void **state)
{
    const char *path = test_path("short.safetensors");
    unsigned char head[16] = {0};
    ferry_source source = {0};

    (void)state;
    write_test_file(path, head, 0);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                 "0 bytes, too short");
    write_test_file(path, head, 7);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                 "7 bytes, too short");
    write_test_file(path, head, 8);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                 "header");
    head[0] = 9;
    head[8] = '{';
    write_test_file(path, head, 16);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                 "header of 9 bytes, the file ends after 8");
    memset(head, 0xFF, 8);
    write_test_file(path, head, 16);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EINVAL,
                 "at most 100000000 are allowed");
    remove(path);
    expect_error(ferry_source_safetensors(path, &source), FERRY_EIO,
                 "short.safetensors");
    expect_error(ferry_source_safetensors(NULL, &source), FERRY_EINVAL, "NULL");
    expect_error(ferry_source_safetensors("/dev/null", &source), FERRY_EIO,
                 "not a regular file");
}

/* ---- sharded ---- */

#define ONE(name)                                                              \
    "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}"

static const char *write_index(const char *json)
{
    const char *path = test_path("model.safetensors.index.json");

    write_test_file(path, json, strlen(json));
    return path;
}

static const char *const SHARDS[] = {"s1.safetensors", "s2.safetensors",
                                     "model.safetensors.index.json", NULL};

static void write_shards(void)
{
    write_safetensors("s1.safetensors", padded(TWO), data, 16);
    write_safetensors("s2.safetensors", ONE("c"), data + 20, 4);
}

static void b6_sharded_index_files_in_name_order(void **state)
{
    const expected_param want[3] = {
        two[0], two[1], {"c", FERRY_DTYPE_U8, 1, {4}, data + 20}};
    const char *path;
    ferry_source source = {0};

    (void)state;
    write_shards();
    path = write_index("{\"metadata\":{\"total_size\":20},\"weight_map\":{"
                       "\"c\":\"s2.safetensors\",\"a\":\"s1.safetensors\","
                       "\"b\":\"s1.safetensors\"}}");
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    expect_pass(&source, want, 3);
    expect_pass(&source, want, 3);
    ferry_source_close(&source);
    /* The folder of the index is the same checkpoint. */
    assert_int_equal(ferry_source_open(test_path("."), &source), FERRY_OK);
    expect_pass(&source, want, 3);
    ferry_source_close(&source);
    remove_files(SHARDS);
}

static void b6_names_beyond_the_map_are_left_out(void **state)
{
    ferry_source source = {0};
    const char *path;

    (void)state;
    write_shards();
    path = write_index("{\"weight_map\":{\"b\":\"s1.safetensors\"}}");
    assert_int_equal(ferry_source_safetensors(path, &source), FERRY_OK);
    expect_pass(&source, two + 1, 1);
    ferry_source_close(&source);
    remove_files(SHARDS);
}

static void malformed_indexes_are_named(void **state)
{
    static const struct {
        const char *json;
        ferry_status status;
        const char *text;
    } cases[] = {
        {"", FERRY_EINVAL, "index"},
        {"[]", FERRY_EINVAL, "weight_map is missing"},
        {"{\"weight_map\":[]}", FERRY_EINVAL, "weight_map is missing"},
        {"{\"weight_map\":{\"a\":1}}", FERRY_EINVAL,
         "parameter a: its file is not a name"},
        {"{\"weight_map\":{\"a\":\"\"}}", FERRY_EINVAL,
         "parameter a: its file is not a name"},
        {"{\"weight_map\":{\"a\":\"../s1.safetensors\"}}", FERRY_EINVAL,
         "\"../s1.safetensors\" is not in the folder"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", FERRY_EINVAL,
         "\"/etc/passwd\" is not in the folder"},
        {"{\"weight_map\":{\"a\":\"..\"}}", FERRY_EINVAL, "\"..\" is not"},
        {"{\"weight_map\":{\"a\":\"s3.safetensors\"}}", FERRY_EIO,
         "s3.safetensors: open"},
        {"{\"weight_map\":{\"c\":\"s1.safetensors\"}}", FERRY_EINVAL,
         "parameter c: not in s1.safetensors"},
        {"{\"weight_map\":{\"a\":\"s1.safetensors\","
         "\"a\":\"s2.safetensors\"}}",
         FERRY_EINVAL, "index"},
    };
    ferry_source source = {0};

    (void)state;
    write_shards();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *path = write_index(cases[i].json);

        expect_error(ferry_source_safetensors(path, &source), cases[i].status,
                     cases[i].text);
        assert_null(source.ops);
    }
    remove_files(SHARDS);
}

static void folders_without_one_answer_are_refused(void **state)
{
    const char *folder = test_path("folder");
    ferry_source source = {0};

    (void)state;
    assert_int_equal(mkdir(folder, 0700), 0);
    expect_error(ferry_source_safetensors(folder, &source), FERRY_EIO,
                 "holds neither");
    expect_error(ferry_source_open(folder, &source), FERRY_EIO,
                 "holds no safetensors");
    write_safetensors("folder/x.safetensors", padded(TWO), data, 16);
    assert_int_equal(ferry_source_open(folder, &source), FERRY_OK);
    expect_pass(&source, two, 2);
    ferry_source_close(&source);
    write_safetensors("folder/y.safetensors", padded(TWO), data, 16);
    expect_error(ferry_source_safetensors(folder, &source), FERRY_EIO,
                 "name the one");
    remove(test_path("folder/x.safetensors"));
    remove(test_path("folder/y.safetensors"));
    rmdir(test_path("folder"));
    expect_error(ferry_source_open(test_path("nowhere"), &source), FERRY_EIO,
                 "nowhere");
    expect_error(ferry_source_open(NULL, &source), FERRY_EINVAL, "NULL");
}

static void every_allocation_and_mapping_may_fail(void **state)
{
    static const ferry__fault kinds[2] = {FERRY__FAULT_ALLOC,
                                          FERRY__FAULT_MMAP};
    ferry_source source = {0};
    const char *path;

    (void)state;
    write_shards();
    path = write_index("{\"weight_map\":{\"c\":\"s2.safetensors\","
                       "\"a\":\"s1.safetensors\"}}");
    for (int kind = 0; kind < 2; kind++) {
        ferry_status st = FERRY_ENOMEM;
        uint64_t n = 0;

        while (st != FERRY_OK) {
            assert_null(source.ops);
            assert_true(n < 500);
            ferry__fault_arm(kinds[kind], ++n);
            st = ferry_source_safetensors(path, &source);
            assert_true(st == FERRY_OK || st == FERRY_ENOMEM ||
                        st == FERRY_EIO);
        }
        ferry__fault_arm(kinds[kind], 0);
        assert_true(n > 3);
        ferry_source_close(&source);
    }
    remove_files(SHARDS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b6_single_file_in_the_order_of_its_bytes),
        cmocka_unit_test(b6_every_dtype_scalars_and_empty_shapes),
        cmocka_unit_test(b6_unaligned_data),
        cmocka_unit_test(b6_no_tensors_at_all),
        cmocka_unit_test(malformed_headers_are_named),
        cmocka_unit_test(what_is_no_safetensors_file_is_said_to_be_none),
        cmocka_unit_test(malformed_lengths_are_named),
        cmocka_unit_test(b6_sharded_index_files_in_name_order),
        cmocka_unit_test(b6_names_beyond_the_map_are_left_out),
        cmocka_unit_test(malformed_indexes_are_named),
        cmocka_unit_test(folders_without_one_answer_are_refused),
        cmocka_unit_test(every_allocation_and_mapping_may_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
