/* SPDX-License-Identifier: Apache-2.0 */
/* Shared host memory: reserved, sealed, and found by address. */
#include "device/gate.h"
#include "device/shared.h"

#include "base/alloc.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;

    if (!dir)
        return -1;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void created_memory_is_zero_sealed_and_page_rounded(void **state)
{
    struct stat info;
    char *memory;
    void *p;
    int fd;

    (void)state;
    assert_int_equal(ferry__shared_create("test", 5000, &fd, &p), FERRY_OK);
    memory = p;
    assert_int_equal(fstat(fd, &info), 0);
    assert_int_equal(info.st_size, 8192);
    /* Reserved at once: the blocks are there before the first touch. */
    assert_true(info.st_blocks * 512 >= 8192);
    for (int i = 0; i < 8192; i++)
        assert_int_equal(memory[i], 0);
    assert_int_equal(ftruncate(fd, 0), -1);
    assert_int_equal(ftruncate(fd, 16384), -1);
    assert_true(fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK);
    ferry__shared_unmap(p, 5000);
    close(fd);
}

static void mapping_shows_the_owners_bytes_and_is_read_only(void **state)
{
    char *mine, *theirs;
    void *p, *q;
    pid_t child;
    int fd, how;

    (void)state;
    assert_int_equal(ferry__shared_create("test", 4096, &fd, &p), FERRY_OK);
    mine = p;
    strcpy(mine, "hello");
    assert_int_equal(ferry__shared_map(fd, 4096, 0, &q), FERRY_OK);
    theirs = q;
    assert_string_equal(theirs, "hello");
    child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)theirs = 'x';
        _exit(0);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_false(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    assert_string_equal(mine, "hello");
    ferry__shared_unmap(q, 4096);
    ferry__shared_unmap(p, 4096);
    close(fd);
}

static void unsealed_short_and_foreign_descriptors_are_refused(void **state)
{
    int fd = memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int pipes[2];
    void *p;

    (void)state;
    assert_int_equal(ftruncate(fd, 4096), 0);
    assert_int_equal(ferry__shared_map(fd, 4096, 0, &p), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "not sealed"));
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    assert_int_equal(ferry__shared_map(fd, 8192, 0, &p), FERRY_EPEER);
    assert_non_null(strstr(ferry_last_error(), "4096"));
    assert_non_null(strstr(ferry_last_error(), "8192"));
    close(fd);
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(ferry__shared_map(pipes[0], 1, 0, &p), FERRY_EPEER);
    close(pipes[0]);
    close(pipes[1]);
}

/* O-50: a full system is an error at once, and no signal. */
static void o50_no_space_is_an_error_and_no_signal(void **state)
{
    pid_t child;
    int how;

    (void)state;
    child = fork();
    if (child == 0) {
        struct rlimit small = {1 << 20, 1 << 20};
        void *p = NULL;
        int good;

        setrlimit(RLIMIT_FSIZE, &small);
        good = ferry_shared_alloc((size_t)4 << 20, &p) == FERRY_ENOSPC &&
               p == NULL && strstr(ferry_last_error(), "4194304") != NULL;
        good = good && ferry_shared_alloc(4096, &p) == FERRY_OK;
        ferry_shared_free(p);
        good = good && ferry_shared_alloc(SIZE_MAX, &p) == FERRY_EOVERFLOW;
        good = good && ferry_shared_alloc((size_t)1 << 46, &p) == FERRY_ENOSPC;
        _exit(good ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
}

static void failing_map_leaves_no_descriptor(void **state)
{
    int before = count_entries("/proc/self/fd");
    void *p = NULL;

    (void)state;
    ferry__fault_arm(FERRY__FAULT_MMAP, 1);
    assert_int_equal(ferry_shared_alloc(4096, &p), FERRY_ENOMEM);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 1);
    assert_int_equal(ferry_shared_alloc(4096, &p), FERRY_ENOMEM);
    ferry__fault_arm(FERRY__FAULT_ALLOC, 0);
    ferry__fault_arm(FERRY__FAULT_MMAP, 0);
    assert_int_equal(count_entries("/proc/self/fd"), before);
}

static void arenas_are_found_by_address(void **state)
{
    enum { N = 40 };
    char *memory[N];
    ferry__arena arena;
    uint64_t last = 0;

    (void)state;
    for (int i = 0; i < N; i++) {
        void *p;

        assert_int_equal(ferry_shared_alloc((size_t)i * 1000, &p), FERRY_OK);
        memory[i] = p;
    }
    for (int i = 1; i < N; i++) {
        size_t size = (size_t)i * 1000;

        assert_true(ferry__arena_find(memory[i], size, &arena));
        assert_ptr_equal(arena.memory, memory[i]);
        assert_int_equal(arena.size_bytes, size);
        assert_true(arena.id > last);
        last = arena.id;
        assert_true(ferry__arena_find(memory[i] + size - 1, 1, &arena));
        assert_false(ferry__arena_find(memory[i] + size - 1, 2, &arena));
        assert_false(ferry__arena_find(memory[i], size + 1, &arena));
    }
    assert_false(ferry__arena_find(&arena, 1, &arena));
    for (int i = 0; i < N; i += 2)
        ferry_shared_free(memory[i]);
    for (int i = 1; i < N; i += 2)
        assert_true(ferry__arena_find(memory[i], 1, &arena));
    assert_false(ferry__arena_find(memory[2], 1, &arena) &&
                 arena.memory == memory[2]);
    for (int i = 1; i < N; i += 2)
        ferry_shared_free(memory[i]);
    ferry_shared_free(NULL);
    ferry_shared_free(&arena); /* not an arena: nothing happens */
}

static void nothing_is_left_behind(void **state)
{
    int shm = count_entries("/dev/shm");
    int fds = count_entries("/proc/self/fd");

    (void)state;
    for (int i = 0; i < 20; i++) {
        void *p;

        assert_int_equal(ferry_shared_alloc(100000, &p), FERRY_OK);
        ferry_shared_free(p);
    }
    assert_int_equal(count_entries("/dev/shm"), shm);
    assert_int_equal(count_entries("/proc/self/fd"), fds);
}

static void gate_wakes_another_process_and_wraps(void **state)
{
    ferry__gate *gate = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child;
    int how;

    (void)state;
    atomic_store(&gate->value, UINT32_MAX - 1);
    assert_true(ferry__gate_reached(gate, UINT32_MAX - 2));
    assert_false(ferry__gate_reached(gate, 1));
    assert_false(ferry__gate_await(gate, 1, 1));
    child = fork();
    if (child == 0) {
        for (int i = 0; i < 50 && !ferry__gate_await(gate, 1, 100); i++)
            ;
        _exit(ferry__gate_reached(gate, 1) ? 0 : 1);
    }
    usleep(20000);
    ferry__gate_raise(gate, UINT32_MAX);
    ferry__gate_raise(gate, 1);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    munmap(gate, 4096);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(created_memory_is_zero_sealed_and_page_rounded),
        cmocka_unit_test(mapping_shows_the_owners_bytes_and_is_read_only),
        cmocka_unit_test(unsealed_short_and_foreign_descriptors_are_refused),
        cmocka_unit_test(o50_no_space_is_an_error_and_no_signal),
        cmocka_unit_test(failing_map_leaves_no_descriptor),
        cmocka_unit_test(arenas_are_found_by_address),
        cmocka_unit_test(nothing_is_left_behind),
        cmocka_unit_test(gate_wakes_another_process_and_wraps),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
