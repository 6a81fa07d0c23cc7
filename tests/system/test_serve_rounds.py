# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=300 serial
"""Many rounds through a real server: what a round leaves behind, what a rank
needs at its peak, who resumes generation, and what a wrong address is told
(E7; O-05, O-37, O-47, O-59, O-62)."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, ferry, push  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]
# Some 13 million parameters in 4 layers: large enough that one layer stands
# out from the noise of a process.
checkpoints.VARIANTS["llama"]["medium"] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4,
}
MIB = 1 << 20


def make(folder: Path, seed: int, variant: str = "gqa") -> Path:
    checkpoints.make(str(folder), arch="llama", variant=variant, seed=seed,
                     dtype="BF16")
    return folder


# ---- O-05: who resumes ----


def test_o05_a_paused_round_resumes_after_success_and_says_why_not(
    tmp_path: Path,
) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    wrong = make(tmp_path / "wrong", 3, "padded")
    with Server(tmp_path / "serve", a, "--kernel-format", "bf16",
                "--commit", "staged") as server:
        push(b, server.url, version="v1", extra=("--pause",))
        assert server.get("/is_paused").json == {"is_paused": False}
        started = time.monotonic()
        assert server.generate(PROMPT, 3)["weight_versions"][0]["version"] == "v1"
        assert time.monotonic() - started < 5

        # A failed round: the server stays paused, and the reason is said.
        done = push(wrong, server.url, extra=("--pause",), check=False)
        assert done.returncode == 1
        assert "stays paused" in done.stderr, done.stderr
        assert "embed_tokens" in done.stderr or "lm_head" in done.stderr
        assert server.get("/is_paused").json == {"is_paused": True}
        assert server.status()["paused"] == "keep"
        assert server.status()["last_failure"]
        queued: dict = {}
        thread = threading.Thread(
            target=lambda: queued.update(server.generate(PROMPT, 3)))
        thread.start()
        time.sleep(0.3)
        assert not queued
        # The next round that works resumes it: the queued request ends.
        push(b, server.url, version="v2", extra=("--pause",))
        thread.join(10)
        assert queued["weight_versions"][0]["version"] == "v2"
        assert server.get("/is_paused").json == {"is_paused": False}
        # A trainer that was not asked to pause neither pauses nor resumes.
        assert server.post("/pause?mode=keep").code == 200
        push(a, server.url)
        assert server.get("/is_paused").json == {"is_paused": True}
        assert server.post("/resume").code == 200


# ---- O-62: wrong addresses ----


def test_o62_wrong_addresses_are_told_apart(tmp_path: Path) -> None:
    a = make(tmp_path / "a", 1)
    with Server(tmp_path / "on", a, "--kernel-format", "bf16") as on, Server(
        tmp_path / "off", a, "--kernel-format", "bf16", weights=False
    ) as off:
        said = []
        for url in [on.url + "/v1", on.url + "//x", off.url]:
            done = push(a, url, check=False)
            assert done.returncode != 0
            said.append(done.stderr)
        assert "/v1" in said[0] and "at the root" in said[0], said[0]
        assert "weight-transfer-config" in said[2], said[2]
        assert len(set(said)) == 3
        push(a, on.url + "/")


# ---- O-37, O-47, O-59: what a round leaves ----


class Usage:
    """What a process holds."""

    def __init__(self, pid: int) -> None:
        self.fds = len(os.listdir(f"/proc/{pid}/fd"))
        self.threads = len(os.listdir(f"/proc/{pid}/task"))
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        # Where the large memory is: weights stay at their addresses.
        self.large = sorted(
            line.split()[0] for line in lines
            if int(line.split()[0].split("-")[1], 16)
            - int(line.split()[0].split("-")[0], 16) >= 4 * MIB
            and "---p" not in line)
        self.maps = len(lines)
        self.resident = next(
            int(line.split()[1]) * 1024
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if line.startswith("VmRSS"))


def settled(pids: list[int]) -> list[Usage]:
    """Usage once what watched the last trainer has gone: the same twice."""
    until = time.monotonic() + 10
    last = [Usage(pid) for pid in pids]
    while time.monotonic() < until:
        time.sleep(0.2)
        now = [Usage(pid) for pid in pids]
        if [(x.fds, x.threads) for x in now] == [
                (x.fds, x.threads) for x in last]:
            return now
        last = now
    return last


def test_o59_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    """The same trainer many times, and many trainers once each."""
    a = make(tmp_path / "a", 1, "medium")
    with Server(tmp_path / "serve", a, "--kernel-format", "bf16", "--threads",
                "1", "--tensor-parallel-size", "2") as server:
        pids = [server.process.pid, *server.rank_pids()]
        segments = sorted(os.listdir("/dev/shm"))
        for kind in [("--rounds", "20"), ("--rounds", "20", "--packed")]:
            push(a, server.url, extra=kind)
            push(a, server.url)
            before = settled(pids)
            for _ in range(3):
                push(a, server.url, extra=kind)
            for _ in range(8):
                push(a, server.url)
            after = settled(pids)
            for x, y in zip(before, after):
                assert (y.fds, y.threads) == (x.fds, x.threads)
                # Sanitizers map memory of their own and keep what is freed.
                if not os.environ.get("FERRY_SANITIZE"):
                    assert abs(y.maps - x.maps) <= 2
                    assert y.resident <= x.resident * 1.01 + 2 * MIB
            # Ranks: the storage is where it was, and nothing large beside it.
            for x, y in zip(before[1:], after[1:]):
                assert y.large == x.large
        assert [server.process.pid, *server.rank_pids()] == pids
        assert sorted(os.listdir("/dev/shm")) == segments
        want = stored.digests(model_files.open_model(str(a)), 2, 1, "bf16")
        assert server.checksums() == want


# ---- E7: the peak ----


class Peak:
    """The highest proportional set size of processes while a block runs."""

    def __init__(self, pids: list[int], field: str = "Pss:") -> None:
        self.pids, self.field = pids, field
        self.first = {pid: self.read(pid) for pid in pids}
        self.peak = dict(self.first)
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def read(self, pid: int) -> int:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(self.field):
                return int(line.split()[1]) * 1024
        raise AssertionError(self.field)

    def _run(self) -> None:
        while not self._stop.is_set():
            for pid in self.pids:
                self.peak[pid] = max(self.peak[pid], self.read(pid))
            self.samples += 1

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def extra(self) -> int:
        return max(self.peak[pid] - self.first[pid] for pid in self.pids)


def layer_bytes(folder: Path) -> int:
    """One layer of the checkpoint as it travels, bf16."""
    tensors = model_files.open_model(str(folder)).tensors
    return sum(2 * t.f32().size for name, t in tensors.items()
               if name.startswith("model.layers.0."))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make(tmp_path_factory.mktemp("medium") / "a", 1, "medium")


# Agreed at init: two chunk buffers of 2 MiB, or the ring of one call, whose
# four slots of 1 MiB are the protocol's. A rank maps them; shared pages count
# by their share, so the bound is an upper one.
BUFFERS = 4 * MIB
CHUNKS = (
    "--init-info",
    '{"packed":true,"packed_buffer_size_bytes":2097152,"packed_num_buffers":2}',
)


@pytest.mark.skipif(
    "thread" in os.environ.get("FERRY_SANITIZE", ""),
    reason="the thread sanitizer's shadow memory counts as the rank's",
)
@pytest.mark.parametrize(
    ("kernel", "commit", "extra"),
    [
        ("bf16", "inplace", CHUNKS),
        ("q8_0", "inplace", CHUNKS),
        ("bf16", "inplace", ()),
        ("bf16", "staged", CHUNKS),
    ],
)
def test_e7_a_ranks_peak_is_the_agreed_buffers_and_one_layer(
    medium: Path, tmp_path: Path, kernel: str, commit: str,
    extra: tuple[str, ...],
) -> None:
    bound = BUFFERS + layer_bytes(medium) + MIB
    whole = sum(2 * t.f32().size for t in
                model_files.open_model(str(medium)).tensors.values())
    # A rank that gathered its half of the model first would show.
    assert bound < whole // 2
    with Server(tmp_path, medium, "--kernel-format", kernel, "--commit", commit,
                "--threads", "1", "--tensor-parallel-size", "2") as server:
        with Peak(server.rank_pids()) as first:
            push(medium, server.url, extra=extra)
        # A staged commit adds its one stated copy, once and for all.
        copy = whole // 2 if commit == "staged" else 0
        assert first.extra() <= bound + copy, f"{first.extra() / MIB:.1f} MiB"
        with Peak(server.rank_pids()) as peak:
            push(medium, server.url, extra=(*extra, "--rounds", "3"))
        assert peak.samples > 10
        assert peak.extra() <= bound, (
            f"{peak.extra() / MIB:.1f} MiB above, {bound / MIB:.1f} agreed")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
