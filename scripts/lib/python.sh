#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Python part of scripts/test: an environment with torch, the binding,
# types, style, tests. Sourced after setup.sh and parts.sh; or run by hand to
# make the environment and build the binding:
#   scripts/lib/python.sh; PYTHONPATH=build/python build/venv-torch/bin/python

# shellcheck source=scripts/lib/setup.sh
[ -n "${FERRY_ROOT:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
FERRY_TORCH_VENV="${FERRY_TORCH_VENV:-$FERRY_ROOT/build/venv-torch}"
# Exact, so that two fresh machines get the same; the environment is made
# anew when a line changes.
FERRY_TORCH_PIP="${FERRY_TORCH_PIP:-torch==2.13.0}"
FERRY_PYTHON_PIP="numpy==2.3.5 cffi==2.1.1 typing_extensions safetensors
    mypy==2.4.1 ruff==0.17.6 pytest==9.2.0 pytest-timeout==2.4.0"
# Its tests are skipped where it cannot be had.
FERRY_RAY_PIP="ray==2.60.0"

python_setup() {
    local python="$FERRY_TORCH_VENV/bin/python" log why
    local stamp="$FERRY_TORCH_VENV/ferry-packages"
    local want="$FERRY_TORCH_PIP $FERRY_PYTHON_PIP"
    [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && return
    setup_say "making a Python environment with torch in" \
        "${FERRY_TORCH_VENV#"$FERRY_ROOT"/}"
    log=$(mktemp)
    # shellcheck disable=SC2086
    if ! { python3 -m venv --clear "$FERRY_TORCH_VENV" &&
        "$python" -m pip install -q --disable-pip-version-check \
            $FERRY_TORCH_PIP $FERRY_PYTHON_PIP; } >"$log" 2>&1; then
        why=$(grep -m1 '^ERROR' "$log" || tail -n 1 "$log")
        rm -f "$log"
        setup_die "the Python environment: $why"
    fi
    rm -f "$log"
    printf '%s\n' "$want" >"$stamp"
}

python_setup_ray() {
    local python="$FERRY_TORCH_VENV/bin/python" log
    "$python" -c 'import ray' >/dev/null 2>&1 && return
    setup_say "installing with pip: $FERRY_RAY_PIP"
    log=$(mktemp)
    "$python" -m pip install -q --disable-pip-version-check \
        "$FERRY_RAY_PIP" >"$log" 2>&1 ||
        setup_say "no Ray, its tests are skipped:" \
            "$(grep -m1 '^ERROR' "$log" || tail -n 1 "$log")"
    rm -f "$log"
}

# The binding and all that the tests start, in build/.
python_build() {
    local log rc=0
    log=$(mktemp)
    (cd "$FERRY_ROOT" &&
        cmake --preset release -DFERRY_PYTHON_PACKAGE=ON \
            -DPython_EXECUTABLE="$FERRY_TORCH_VENV/bin/python" &&
        cmake --build --preset release -j "${FERRY_JOBS:-$(nproc)}" \
            --target ferry_python ferry_program ferry_worker build_support \
                example_file_trainer
    ) >"$log" 2>&1 || rc=$?
    [ "$rc" -eq 0 ] || grep -E -A 20 'error|FAILED|CMake Error' "$log" |
        head -n 60 || tail -n 40 "$log"
    rm -f "$log"
    return "$rc"
}

python_types() { "$FERRY_TORCH_VENV/bin/mypy"; }
python_style() {
    "$FERRY_TORCH_VENV/bin/ruff" check -q python tests/python examples
}

# All of it, as parts of a test run.
python_parts() {
    part_check "python environment" python_setup || return 1
    python_setup_ray
    part_check "python types" python_types || true
    part_check "python style" python_style || true
    part_check "python build" python_build || return 1
    part_check "torch's store" python_store || true
    part_pytest "python tests" tests/python
}

# torch's own TCPStore against ours, either way round.
python_store() {
    TORCH_CPP_LOG_LEVEL=ERROR FERRY_BUILD_DIR="$FERRY_ROOT/build" \
        timeout 180 \
        "$FERRY_TORCH_VENV/bin/python" \
        "$FERRY_ROOT/tests/interop/test_tcp_store_torch.py"
}

# part_pytest NAME PATH...: runs pytest in the environment with torch.
part_pytest() {
    local name=$1 start=$SECONDS report counts passed failed skipped tmp
    shift
    parts_say "$name"
    report=$(mktemp)
    tmp=$(mktemp -d /tmp/ferry-p.XXXXXX)
    TMPDIR="$tmp" PYTHONPATH="$FERRY_ROOT/build/python" \
        PYTHONDONTWRITEBYTECODE=1 FERRY_SOURCE_DIR="$FERRY_ROOT" \
        FERRY_BUILD_DIR="$FERRY_ROOT/build" \
        FERRY_BIN="$FERRY_ROOT/build/bin/ferry" \
        "$FERRY_TORCH_VENV/bin/python" -m pytest -q --timeout 120 \
        --junit-xml "$report" "$@" || true
    rm -rf "$tmp"
    counts=$(python3 - "$report" <<'PY'
import sys, xml.etree.ElementTree as tree
try:
    suite = next(tree.parse(sys.argv[1]).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        int(suite.get(key, 0))
        for key in ("tests", "failures", "errors", "skipped"))
except Exception:
    tests = failures = errors = skipped = 0
bad = failures + errors
print(tests - bad - skipped, bad or int(not tests), skipped)
PY
    )
    rm -f "$report"
    read -r passed failed skipped <<<"$counts"
    PARTS_PASSED=$((PARTS_PASSED + passed))
    PARTS_FAILED=$((PARTS_FAILED + failed))
    [ "$failed" -eq 0 ] || PARTS_BROKEN+=("$name")
    part_done "$name" "$start" \
        "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    python_setup
    python_build
    setup_say "ready"
fi
