#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An installed tree is whole: it is moved after installing, and a project
# outside builds and runs against it through pkg-config and through CMake.
# ctest: timeout=180
set -eu
fail() { echo "install: $*"; exit 1; }
if [ -n "${FERRY_SANITIZE:-}" ]; then
    echo "an instrumented tree is not one to install"
    exit 77
fi
unset LD_LIBRARY_PATH FERRY_MODULE_PATH

cmake --install "$FERRY_BUILD_DIR" --prefix "$TMPDIR/first" \
    >"$TMPDIR/log" 2>&1 || { cat "$TMPDIR/log"; fail "cmake --install"; }
mv "$TMPDIR/first" "$TMPDIR/moved"
root="$TMPDIR/moved"
lib=$(dirname "$(find "$root" -name libferry.so)")

mkdir "$TMPDIR/outside"
cd "$TMPDIR/outside"
cat >main.c <<'C'
#include <ferry/backend.h>
#include <ferry/ferry.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    ferry_backend_info info = {.size = sizeof(info)};
    ferry_dtype dtype;

    if (ferry_dtype_parse("torch.bfloat16", &dtype) != FERRY_OK)
        return 1;
    if (ferry_worker_list(0, &info) != FERRY_OK)
        return 2;
    printf("%s %s\n", ferry_dtype_name(dtype), ferry_status_name(FERRY_EIO));
    return strcmp(ferry_dtype_name(dtype), "bfloat16") != 0;
}
C
check() {
    local said
    said=$("$@") || fail "$1 exits with $?"
    [ "$said" = "bfloat16 EIO" ] || fail "$1 says: $said"
}

export PKG_CONFIG_PATH="$lib/pkgconfig"
for cc in gcc clang; do
    command -v "$cc" >/dev/null 2>&1 || continue
    # shellcheck disable=SC2046
    "$cc" -std=c11 -Wall -Werror main.c $(pkg-config --cflags --libs ferry) \
        -Wl,-rpath,"$lib" -o "with-$cc"
    check "./with-$cc"
done
[ "$(pkg-config --modversion ferry)" = \
    "$(sed -n 's/^set(PACKAGE_VERSION "\(.*\)")$/\1/p' \
        "$lib/cmake/Ferry/FerryConfigVersion.cmake")" ] ||
    fail "ferry.pc and the CMake package differ in version"

cat >CMakeLists.txt <<'C'
cmake_minimum_required(VERSION 3.21)
project(outside LANGUAGES C)
find_package(Ferry 0.1 REQUIRED)
add_executable(outside main.c)
target_link_libraries(outside PRIVATE Ferry::ferry)
C
cmake -S . -B out -DCMAKE_PREFIX_PATH="$root" >log 2>&1 &&
    cmake --build out >>log 2>&1 || { cat log; fail "the CMake project"; }
check ./out/outside

# What is installed finds its own libraries, from where it now is.
for file in "$lib"/*.so "$lib"/*.so.* "$lib"/ferry/*.so "$root"/bin/*; do
    [ -e "$file" ] || continue
    if ldd "$file" | grep 'not found'; then
        fail "$file lacks a library"
    fi
    if ldd "$file" | grep -F "$FERRY_BUILD_DIR/"; then
        fail "$file still looks into the build tree"
    fi
done
if [ -x "$root/bin/ferry" ]; then
    "$root/bin/ferry" info --json >info.json || fail "ferry info --json"
    "$FERRY_PYTHON" - info.json <<'PY' || fail "ferry info: ipc is missing"
import json, sys
text = json.dumps(json.load(open(sys.argv[1])))
sys.exit('"ipc"' not in text)
PY
fi
echo "install: ok"
