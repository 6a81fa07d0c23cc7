# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240 serial labels=no_tsan
"""Chaos, short: rounds of two servers' lives with faults of every process
(H4, J4; O-12, O-13, O-19, O-50, O-58). scripts/deep runs thousands."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import chaos  # noqa: E402
from ferry_server import FERRY, http, push  # noqa: E402


# Rounds before 40 are of one server, staged; from 80 of a fleet.
@pytest.mark.parametrize("backend,first,rounds", [
    ("ipc", 0, 12), ("ipc", 80, 8), ("nccl", 0, 12), ("nccl", 80, 8)])
def test_a_fault_in_every_round(tmp_path: Path, backend: str, first: int,
                                rounds: int) -> None:
    run = chaos.Chaos(5, tmp_path, print, backend)
    try:
        run.run(range(first, first + rounds))
    except chaos.Broken:
        run.abandon()
        raise
    print(chaos.matrix(5, run.rows))


def test_a_replayed_round_is_the_same_fault() -> None:
    for k in range(200):
        assert chaos.Plan.draw(3, k) == chaos.Plan.draw(3, k)
    assert len({chaos.Plan.draw(3, k) for k in range(200)}) > 190


def serve_on_full_disk(folder: Path, model: Path, *more: str,
                       log: str) -> subprocess.Popen[str]:
    """A server that alone sees a full disk at `folder`/full."""
    full = folder / "full"
    full.mkdir(exist_ok=True)
    script = (f"mount -t tmpfs -o size=16k none {full} && "
              f"(head -c 65536 /dev/zero >{full}/x 2>/dev/null || true) && "
              f'exec "$@" {log}')
    return subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script, "sh", FERRY, "serve",
         str(model), "--port", "0", "--threads", "1", "--load-format",
         "dummy", "--weight-transfer-config", chaos.ferry_server.IPC, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "FERRY_LOG_LEVEL": "debug"})


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_o50_a_full_disk_is_named_or_does_no_harm(tmp_path: Path) -> None:
    fixture = chaos.Fixture(tmp_path)
    process = serve_on_full_disk(
        tmp_path, fixture.path(0), "--port-file",
        str(tmp_path / "full" / "port"), log="")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "cannot write the port to" in said, said
    port = tmp_path / "port"
    log = f">{tmp_path}/full/log 2>&1"
    process = serve_on_full_disk(tmp_path, fixture.path(0), "--port-file",
                                 str(port), log=log)
    try:
        deadline = time.monotonic() + 30
        while not port.exists() or not port.read_text().strip():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        url = f"http://127.0.0.1:{int(port.read_text())}"
        push(fixture.path(1), url, version="full")
        assert http(f"{url}/health").json["ready"] is True
    finally:
        process.terminate()
        assert process.wait(20) == 0
