#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What scripts/test and scripts/deep share: named parts, each with its wall
# time, its count of passed and failed checks, and no stop at the first
# failure, so that one run shows all there is to mend.
# Sourced after scripts/lib/setup.sh.

PARTS_PASSED=0
PARTS_FAILED=0
PARTS_SUMMARY=()
PARTS_BROKEN=()
PARTS_JOBS="${FERRY_JOBS:-$(nproc)}"

parts_say() { printf '\n== %s\n' "$*"; }

# part_check NAME COMMAND...: one check that passes or fails as a whole.
part_check() {
    local name=$1 start=$SECONDS rc=0
    shift
    parts_say "$name"
    "$@" || rc=$?
    if [ "$rc" -eq 0 ]; then
        PARTS_PASSED=$((PARTS_PASSED + 1))
    else
        PARTS_FAILED=$((PARTS_FAILED + 1))
        PARTS_BROKEN+=("$name")
    fi
    part_done "$name" "$start" "$([ "$rc" -eq 0 ] && echo ok || echo FAILED)"
    return "$rc"
}

part_done() {
    local line
    line=$(printf '%-28s %5d s  %s' "$1" "$((SECONDS - $2))" "$3")
    PARTS_SUMMARY+=("$line")
    printf -- '-- %s\n' "$line"
}

# part_build PRESET TARGET...: a failed build counts as one failed check.
part_build() {
    local preset=$1 start=$SECONDS log rc=0
    shift
    parts_say "build $preset"
    log=$(mktemp)
    (cd "$FERRY_ROOT" && cmake --preset "$preset" >"$log" 2>&1 &&
        cmake --build --preset "$preset" -j "$PARTS_JOBS" \
            ${1:+--target "$@"} >>"$log" 2>&1) || rc=$?
    if [ "$rc" -ne 0 ]; then
        grep -E -A 20 'error|FAILED|CMake Error' "$log" | head -n 60 ||
            tail -n 40 "$log"
        PARTS_FAILED=$((PARTS_FAILED + 1))
        PARTS_BROKEN+=("build $preset")
    fi
    rm -f "$log"
    part_done "build $preset" "$start" \
        "$([ "$rc" -eq 0 ] && echo ok || echo FAILED)"
    return "$rc"
}

# part_ctest NAME BUILD_DIR CTEST-ARG...: counts come from the runner's own
# report, and a run over no tests is a failure.
part_ctest() {
    local name=$1 dir=$2 start=$SECONDS report counts passed failed
    shift 2
    parts_say "$name"
    report=$(mktemp)
    ctest --test-dir "$dir" -j "$PARTS_JOBS" --output-on-failure \
        --no-tests=error --output-junit "$report" "$@" || true
    counts=$(python3 - "$report" <<'PY'
import sys, xml.etree.ElementTree as tree
try:
    cases = tree.parse(sys.argv[1]).getroot().findall("testcase")
except Exception:
    cases = []
states = [case.get("status") for case in cases]
bad = [c.get("name") for c in cases if c.get("status") == "fail"]
skipped = sum(s in ("notrun", "disabled") for s in states)
print(len(states) - len(bad) - skipped, len(bad) or int(not cases),
      skipped, " ".join(bad))
PY
    )
    rm -f "$report"
    read -r passed failed skipped bad <<<"$counts"
    PARTS_PASSED=$((PARTS_PASSED + passed))
    PARTS_FAILED=$((PARTS_FAILED + failed))
    [ "$failed" -eq 0 ] || PARTS_BROKEN+=("$name: ${bad:-no tests ran}")
    part_done "$name" "$start" \
        "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

# Prints the wall times and the totals, and ends with the right status.
parts_finish() {
    local line
    printf '\nWall time of each part:\n'
    for line in "${PARTS_SUMMARY[@]}"; do
        printf '  %s\n' "$line"
    done
    printf '  %-28s %5d s\n' "all" "$SECONDS"
    for line in "${PARTS_BROKEN[@]+"${PARTS_BROKEN[@]}"}"; do
        printf 'failed: %s\n' "$line"
    done
    printf '%d passed, %d failed\n' "$PARTS_PASSED" "$PARTS_FAILED"
    [ "$PARTS_FAILED" -eq 0 ]
}
