/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replays a fuzz target's corpus as an ordinary test: every file named on
 * the command line, and every file in every folder named there, is handed
 * to LLVMFuzzerTestOneInput once. A run over no files is a failure.
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path, size_t size, size_t *count)
{
    /* The exact size is allocated, so that a sanitizer sees a read of one
     * byte too many. */
    uint8_t *data = malloc(size ? size : 1);
    FILE *file = fopen(path, "rb");
    int rc = -1;

    if (data && file && fread(data, 1, size, file) == size) {
        LLVMFuzzerTestOneInput(data, size);
        *count += 1;
        rc = 0;
    } else {
        fprintf(stderr, "replay: cannot read %s\n", path);
    }
    if (file)
        fclose(file);
    free(data);
    return rc;
}

static int replay_path(const char *path, size_t *count);

static int replay_dir(const char *path, size_t *count)
{
    struct dirent **names = NULL;
    int n = scandir(path, &names, NULL, alphasort);
    int rc = n < 0 ? -1 : 0;

    for (int i = 0; i < n; i++) {
        char child[4096];

        if (names[i]->d_name[0] != '.') {
            snprintf(child, sizeof(child), "%s/%s", path, names[i]->d_name);
            if (replay_path(child, count) != 0)
                rc = -1;
        }
        free(names[i]);
    }
    free(names);
    return rc;
}

static int replay_path(const char *path, size_t *count)
{
    struct stat info;

    if (stat(path, &info) != 0) {
        fprintf(stderr, "replay: %s is not there\n", path);
        return -1;
    }
    if (S_ISDIR(info.st_mode))
        return replay_dir(path, count);
    return replay_file(path, (size_t)info.st_size, count);
}

int main(int argc, char **argv)
{
    static const uint8_t nothing;
    size_t count = 0;
    int rc = 0;

    LLVMFuzzerTestOneInput(&nothing, 0);
    for (int i = 1; i < argc; i++) {
        if (replay_path(argv[i], &count) != 0)
            rc = 1;
    }
    printf("replayed %zu inputs\n", count);
    return count == 0 ? 1 : rc;
}
