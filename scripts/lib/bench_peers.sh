# SPDX-License-Identifier: Apache-2.0
# Gets what the peers of `scripts/bench broadcast` need. Sourced by
# scripts/bench after setup.sh. Each peer is optional: what cannot be had is
# said in one line here and told as missing by the benchmark.

FERRY_BENCH_VENV="$FERRY_ROOT/build/venv-bench"

# OpenMPI and MPICH live side by side on Debian, as mpicc.openmpi and
# mpicc.mpich.
BENCH_PEER_COMMANDS="mpicc.openmpi:libopenmpi-dev mpirun.openmpi:openmpi-bin
    mpicc.mpich:libmpich-dev mpirun.mpich:mpich ip:iproute2"

bench_peers_packages() {
    local package
    for package in $(setup_missing_commands "$BENCH_PEER_COMMANDS") \
        $(pkg-config --exists ucx || echo libucx-dev); do
        (setup_apt "$package") || setup_say "no $package"
    done
}

bench_peers_pip() {
    "$FERRY_BENCH_VENV/bin/python" -m pip install -q \
        --disable-pip-version-check "$@" >/dev/null 2>&1
}

bench_peers_has() {
    "$FERRY_BENCH_VENV/bin/python" -c "import $1" >/dev/null 2>&1
}

# torch from what lies on this machine where it does, since a build for the
# CPU alone is a tenth of the other's size.
bench_peers_torch() {
    bench_peers_has torch && return 0
    setup_say "installing with pip: torch"
    { bench_peers_pip --no-index --no-deps torch &&
        bench_peers_pip filelock typing-extensions sympy networkx jinja2 \
            fsspec; } || bench_peers_pip torch ||
        setup_say "no torch: gloo will be missing"
}

bench_peers_python() {
    if ! [ -x "$FERRY_BENCH_VENV/bin/python" ]; then
        setup_say "making a Python environment in build/venv-bench"
        python3 -m venv "$FERRY_BENCH_VENV" >/dev/null 2>&1 || {
            setup_say "no python3 -m venv: gloo and ray will be missing"
            return 0
        }
    fi
    bench_peers_has numpy || bench_peers_pip numpy ||
        setup_say "no numpy: gloo and ray will be missing"
    bench_peers_torch
    if ! bench_peers_has ray; then
        setup_say "installing with pip: ray"
        bench_peers_pip ray || setup_say "no ray"
    fi
}

bench_peers() {
    bench_peers_packages
    bench_peers_python
}
