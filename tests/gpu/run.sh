#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Ferry and runs what one GPU can show, in a few minutes:
#   tests/gpu/run.sh
# FERRY_BUILD_DIR names a build to use as it is; FERRY_NCCL_LIBRARY the
# library that speaks NCCL (else the system's, else the package
# nvidia-nccl-cu13, which is fetched into build/nccl); FERRY_PYTHON a Python
# whose torch sees the GPU and which has cffi (else python3, if it does). Ends
# with 0, with 1 when a check failed, with 77 when there was nothing to run on.
set -u

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${FERRY_BUILD_DIR:-}
cc=${CC:-${FERRY_CC:-cc}}
package=nvidia-nccl-cu13
python=${FERRY_PYTHON:-python3}
programs_all="gpu_memory gpu_fetch gpu_round gpu_nccl"

say() { printf '%s\n' "$*"; }

has_gpu() {
    [ -e /dev/nvidia0 ] || [ -e /dev/dxg ] ||
        { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }
}

# Only libferry and its modules: tests and worker need more libraries.
make_build() {
    local binding=OFF

    build=$root/build/gpu
    "$python" -c 'import torch, cffi' >/dev/null 2>&1 && binding=ON
    cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DFERRY_WORKER=OFF -DFERRY_TESTS=OFF \
        -DFERRY_PYTHON_PACKAGE=$binding \
        -DPython_EXECUTABLE="$(command -v "$python")" >"$build.log" 2>&1 &&
        cmake --build "$build" -j "$(nproc)" >>"$build.log" 2>&1
}

make_program() {
    local more=()

    [ "$1" != gpu_round ] || more=("$root"/tests/harness/ipc_rig{,_source}.c)
    "$cc" -std=c11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror \
        -I"$root/include" -I"$root/src" -I"$root/tests" -I"$root/tests/gpu" \
        "$root/tests/gpu/$1.c" "${more[@]}" -o "$programs/$1" \
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
for program in $programs_all; do
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

# run NAME COMMAND...
run() {
    say "== $1"
    shift
    timeout 240 "$@"
    rc=$?
    case $rc in
    0) ran=1 ;;
    77) ;;
    *)
        say "FAILED: ended with $rc"
        failed=1
        ;;
    esac
}

for program in $programs_all; do
    run "$program" "$programs/$program"
done
PYTHONPATH=$build/python FERRY_LIBRARY=$build/lib/libferry.so \
    run torch_source "$python" "$root/tests/gpu/torch_source.py"
[ $failed -eq 0 ] || exit 1
[ $ran -eq 1 ] || exit 77
say "all that ran is ok"
