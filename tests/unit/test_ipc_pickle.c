/* SPDX-License-Identifier: Apache-2.0 */
/* C6: the strict reader of pickled CUDA IPC handles. The bytes here are
 * written by hand; tests/python compares with Python's own pickle. */
#include "backends/ipc/ipc_wire_pickle.h"
#include "base/alloc.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BYTES(text) (text), sizeof(text) - 1

/* torch.Tensor, size (2,), stride (1,), … as a tuple. */
#define HANDLE(dtype_text)                                                     \
    "(\x8c\x05torch\x94\x8c\x06Tensor\x94\x93\x94"                             \
    "h\x01\x8c\x04Size\x93K\x02\x85\x85RK\x01\x85K\x07"                        \
    "\x8c\x0dtorch.storage\x8c\x0cTypedStorage\x93"                            \
    "\x8c\x05torch" dtype_text "\x93K\x03"                                     \
    "C\x02HHJ\x00\x00\x01\x00\x8a\x05\x00\x00\x00\x00\x01\x89"                 \
    "C\x01RM\x00\x02"                                                          \
    "C\x01"                                                                    \
    "E\x88t\x94"
#define BF16                                                                   \
    "\x8c\x08"                                                                 \
    "bfloat16"
#define GPU "\x80\x04}\x8c\x05GPU-0\x94"

static ferry_status read_text(const char *bytes, size_t size,
                              ferry__cuda_handles *out)
{
    unsigned char *copy = ferry__alloc(size ? size : 1);
    ferry_status st;

    memcpy(copy, bytes, size);
    st = ferry__cuda_handles_read(copy, size, out);
    if (st < 0)
        ferry__free(copy);
    return st;
}

static void refused(const char *bytes, size_t size, const char *words)
{
    ferry__cuda_handles handles;

    assert_int_equal(read_text(bytes, size, &handles), FERRY_EINVAL);
    if (strstr(ferry_last_error(), words) == NULL)
        fail_msg("no \"%s\" in: %s", words, ferry_last_error());
}

static void a_packed_handle_has_all_its_fields(void **state)
{
    ferry__cuda_handles h;
    const ferry__cuda_handle *item;

    (void)state;
    assert_int_equal(read_text(BYTES(GPU HANDLE(BF16) "s."), &h), FERRY_OK);
    assert_true(h.packed);
    assert_int_equal(h.n_entries, 1);
    assert_int_equal(ferry__cuda_handles_find(&h, 0, "GPU-0", &item), FERRY_OK);
    assert_int_equal(item->dtype, FERRY_DTYPE_BF16);
    assert_int_equal(item->ndim, 1);
    assert_int_equal(item->shape[0], 2);
    assert_int_equal(item->stride[0], 1);
    assert_int_equal(item->offset, 7);
    assert_int_equal(item->device, 3);
    assert_true(item->typed_storage);
    assert_false(item->is_parameter);
    assert_memory_equal(item->handle.data, "HH", 2);
    assert_int_equal(item->storage_bytes, 65536);
    assert_int_equal(item->storage_offset, (int64_t)1 << 32);
    assert_false(item->requires_grad);
    assert_int_equal(item->ref_counter_offset, 512);
    assert_int_equal(item->event.size, 1);
    assert_true(item->event_sync_required);
    ferry__cuda_handles_free(&h);
}

/* O-48 */
static void a_key_that_is_not_there_is_told_with_those_that_are(void **state)
{
    ferry__cuda_handles h;
    const ferry__cuda_handle *item = NULL;

    (void)state;
    assert_int_equal(
        read_text(BYTES("\x80\x04]}\x8c\x07MIG-abc\x94" HANDLE(BF16) "sa."),
                  &h),
        FERRY_OK);
    assert_false(h.packed);
    assert_int_equal(ferry__cuda_handles_find(&h, 0, "GPU-xyz", &item),
                     FERRY_EMISMATCH);
    assert_non_null(strstr(ferry_last_error(), "GPU-xyz"));
    assert_non_null(strstr(ferry_last_error(), "MIG-abc"));
    assert_null(item);
    /* A prefix is another name. */
    assert_int_equal(ferry__cuda_handles_find(&h, 0, "MIG-ab", &item),
                     FERRY_EMISMATCH);
    ferry__cuda_handles_free(&h);
}

/* O-51 */
static void what_is_no_handle_is_refused_by_opcode_and_offset(void **state)
{
    (void)state;
    refused(BYTES("\x80\x04"
                  "cposix\nsystem\n."),
            "opcode 0x63 at offset 2");
    refused(BYTES("\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01x\x85R."),
            "only torch.Size may be made");
    refused(BYTES("\x80\x04]\x94h\x00"), "opcode 0x68 at offset 4");
    refused(BYTES("\x80\x02]."), "protocol must be 4 or 5");
    refused(BYTES("junk"), "begins with its protocol");
    refused(BYTES(""), "ends at offset 0");
    refused(BYTES("\x80\x04"), "ends at offset 2");
    refused(BYTES("\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x01"),
            "its frame is cut off");
    refused(BYTES("\x80\x04"
                  "C\x05"
                  "ab"),
            "its argument is cut off");
    refused(BYTES("\x80\x04N."), "opcode 0x4e at offset 2");
    refused(BYTES("\x80\x04t."), "there is no mark");
    refused(BYTES("\x80\x04K\x01(\x86."), "a mark is in its way");
    refused(BYTES("\x80\x04h\x00."), "nothing was kept");
    refused(BYTES("\x80\x04K\x00K\x00."), "one value must be left");
    refused(BYTES("\x80\x04K\x00.x"), "one value must be left");
    refused(BYTES("\x80\x04K\x00."), "handles must be a list or a dict");
    refused(BYTES("\x80\x04]K\x00"
                  "a."),
            "must be a dict");
    refused(BYTES("\x80\x04]}a."), "a dict with a device's name");
    refused(BYTES(GPU "K\x00s."), "a handle must be a tuple of 15");
    refused(BYTES(GPU HANDLE("\x8c\x06nugget") "s."), "the dtype");
    refused(BYTES(GPU HANDLE("\x8c\x04"
                             "bf16") "s."),
            "the dtype");
}

static void a_bomb_stays_small(void **state)
{
    size_t n = (size_t)4 << 20;
    char *bomb = malloc(n);

    (void)state;
    memset(bomb, ')', n);
    memcpy(bomb, "\x80\x04", 2);
    refused(bomb, n, "more values than");
    memset(bomb + 2, '(', n - 2);
    refused(bomb, n, "more values than");
    free(bomb);
}

static void base64_is_read_strictly(void **state)
{
    static const char *const bad[] = {"",     "A",    "AB=",  "====", "AA=A",
                                      "A-_A", "AA\n", "gAS=", "gB=="};
    ferry__cuda_handles h;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(ferry__cuda_handles_decode(bad[i], strlen(bad[i]), &h),
                         FERRY_EINVAL);
        assert_non_null(strstr(ferry_last_error(), "standard base64"));
    }
    /* "gARdLg==" is an empty list. */
    assert_int_equal(ferry__cuda_handles_decode("gARdLg==", 8, &h), FERRY_OK);
    assert_int_equal(h.n_entries, 0);
    ferry__cuda_handles_free(&h);
}

static void text_beyond_the_limit_is_not_decoded(void **state)
{
    size_t n = (size_t)100 << 20;
    char *text = malloc(n);
    ferry__cuda_handles h;

    (void)state;
    memset(text, 'A', n);
    assert_int_equal(ferry__cuda_handles_decode(text, n, &h), FERRY_EINVAL);
    assert_non_null(strstr(ferry_last_error(), "at most"));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_packed_handle_has_all_its_fields),
        cmocka_unit_test(a_key_that_is_not_there_is_told_with_those_that_are),
        cmocka_unit_test(what_is_no_handle_is_refused_by_opcode_and_offset),
        cmocka_unit_test(a_bomb_stays_small),
        cmocka_unit_test(base64_is_read_strictly),
        cmocka_unit_test(text_beyond_the_limit_is_not_decoded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
