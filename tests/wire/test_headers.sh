#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each installed header compiles alone, twice in one file, as C11 and as
# C++17, with every compiler at hand, warnings being errors.
set -u
include="$FERRY_SOURCE_DIR/include"
rc=0
count=0

try() {
    local compiler=$1 language=$2 standard=$3 header=$4
    command -v "$compiler" >/dev/null 2>&1 || return 0
    count=$((count + 1))
    if ! printf '#include <%s>\n#include <%s>\n' "$header" "$header" |
        "$compiler" -x "$language" -std="$standard" -Wall -Wextra -Werror \
            -pedantic -I "$include" -fsyntax-only -; then
        echo "$header fails with $compiler as $standard"
        rc=1
    fi
}

for path in "$include"/ferry/*.h; do
    header="ferry/$(basename "$path")"
    try gcc c c11 "$header"
    try clang c c11 "$header"
    try g++ c++ c++17 "$header"
    try clang++ c++ c++17 "$header"
done
echo "$count compilations"
[ "$count" -gt 0 ] && [ "$rc" -eq 0 ]
