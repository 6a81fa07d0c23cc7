#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Ferry and runs what one GPU can show, in a few minutes:
#   tests/gpu/run.sh
# FERRY_BUILD_DIR names a build to use as it is; FERRY_NCCL_LIBRARY the
# library that speaks NCCL (else the system's, else the package
# nvidia-nccl-cu13, which is fetched into build/nccl). Ends with 0, with 1
# when a check failed, with 77 when there was nothing to run on.
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${FERRY_BUILD_DIR:-}
cc=${CC:-${FERRY_CC:-cc}}
package=nvidia-nccl-cu13

say() { printf '%s\n' "$*"; }

has_gpu() {
    [ -e /dev/nvidia0 ] || [ -e /dev/dxg ] ||
        { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
}

# Only libferry and its modules: tests and worker need more libraries.
make_build() {
    build=$root/build/gpu
    cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DFERRY_WORKER=OFF -DFERRY_TESTS=OFF >"$build.log" 2>&1 &&
        cmake --build "$build" -j "$(nproc)" >>"$build.log" 2>&1
}

make_program() {
    "$cc" -std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror \
        -I"$root/include" -I"$root/src" -I"$root/tests/gpu" \
        "$root/tests/gpu/$1.c" -o "$programs/$1" \
        -L"$build/lib" -lferry -lpthread -Wl,-rpath,"$build/lib"
}

find_nccl() {
    local folder=$root/build/nccl/nvidia/nccl/lib
    local known

    known=$(ldconfig -p 2>/dev/null | awk '/libnccl\.so\.2/ {print $NF; exit}')
    if [ -z "$known" ] && [ ! -e "$folder/libnccl.so.2" ]; then
        say "fetching $package into build/nccl"
        python3 -m pip install -q --no-deps --target "$root/build/nccl" \
            "$package" >/dev/null 2>&1 ||
            say "$package cannot be fetched here"
    fi
    [ -n "$known" ] || { [ -e "$folder/libnccl.so.2" ] &&
        known=$folder/libnccl.so.2; }
    [ -z "$known" ] || export FERRY_NCCL_LIBRARY=$known
}

if [ -z "$build" ]; then
    mkdir -p "$root/build"
    make_build || {
        tail -n 20 "$build.log"
        say "FAILED: Ferry does not build here (build/gpu.log has it all)"
        exit 1
    }
fi
programs=$(mktemp -d) || exit 1
trap 'rm -rf "$programs"' EXIT
for program in gpu_memory gpu_nccl; do
    make_program "$program" || {
        say "FAILED: $program does not build"
        exit 1
    }
done

has_gpu || {
    say "skipped: no GPU here (no /dev/nvidia0, nvidia-smi lists none)"
    exit 77
}
[ -n "${FERRY_NCCL_LIBRARY:-}" ] || find_nccl
export FERRY_MODULE_PATH=$build/lib/ferry

failed=0 ran=0
for program in gpu_memory gpu_nccl; do
    say "== $program"
    timeout 240 "$programs/$program"
    rc=$?
    case $rc in
    0) ran=1 ;;
    77) ;;
    *)
        say "FAILED: $program ended with $rc"
        failed=1
        ;;
    esac
done
[ $failed -eq 0 ] || exit 1
[ $ran -eq 1 ] || exit 77
say "all that ran is ok"
