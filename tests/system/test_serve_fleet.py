# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240
"""Several servers behind one push (J4): none serves what not all prepared,
and what a death in between leaves behind is named."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, Server, http as ask, push  # noqa: E402
import checkpoints  # noqa: E402
import model_files  # noqa: E402
import stored  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]


def make(folder: Path, seed: int) -> Path:
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed,
                     dtype="BF16")
    return folder


def expected(folder: Path, tp: int, dp: int) -> dict[str, str]:
    return stored.digests(model_files.open_model(str(folder)), tp, dp, "bf16")


class Relay:
    """Passes requests on to a server; `before` may act on a path first, and
    answer in its place. `hide` keeps /ferry/ routes from the client, as an
    unmodified vLLM has none."""

    def __init__(self, url: str, before=None, hide: bool = False) -> None:
        self.url_behind, self.before, self.hide = url, before, hide
        self.paths: list[str] = []
        relay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size)
                relay.paths.append(self.path)
                if relay.hide and self.path.startswith("/ferry/"):
                    self.answer(404, b'{"detail":"Not Found"}')
                    return
                if relay.before is not None and relay.before(self.path):
                    self.close_connection = True
                    return
                reply = ask(relay.url_behind + self.path, method=self.command,
                            raw=body if self.command == "POST" else None)
                self.answer(reply.code, reply.text.encode())

            do_GET = do_POST = handle_any

        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.thread = threading.Thread(target=self.httpd.serve_forever,
                                       args=(0.05,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join(10)


@pytest.fixture(params=["inplace", "staged"])
def pair(tmp_path: Path, request: pytest.FixtureRequest
         ) -> Iterator[tuple[Server, Server, Path, Path, str]]:
    """Two servers that were pushed v1; the checkpoints of v1 and v2."""
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    args = ("--kernel-format", "bf16", "--threads", "1", "--commit",
            request.param)
    with Server(tmp_path / "s1", a, *args) as one, Server(
        tmp_path / "s2", a, *args, "--tensor-parallel-size", "2"
    ) as two:
        push(a, one.url, two.url, version="v1")
        yield one, two, a, b, request.param


def kill_rank(server: Server) -> None:
    """Kills one rank and waits until the server has seen it."""
    before = server.status()["replicas"][0]["restarts"]
    os.kill(server.rank_pids()[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.status()["replicas"][0]["restarts"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def serves(server: Server, folder: Path, tp: int, version: str) -> None:
    assert server.get("/health").json["ready"] is True
    assert server.checksums() == expected(folder, tp, 1)
    assert server.generate(PROMPT, 2)["weight_versions"][0]["version"] == version


def kept_or_refuses(server: Server, commit: str, old: Path, tp: int) -> None:
    """After an abort: the old version where it was staged, else nothing."""
    assert server.get("/weight_info").json == {"weight_version": "v1"}
    if commit == "staged":
        serves(server, old, tp, "v1")
    else:
        assert server.post("/v1/completions", {"prompt": PROMPT}).code == 503


def test_j4_all_prepare_before_any_commits(pair) -> None:
    one, two, _, b, _ = pair
    order: list[tuple[str, str]] = []
    with Relay(one.url, lambda p: order.append(("one", p))) as first, Relay(
        two.url, lambda p: order.append(("two", p))
    ) as second:
        push(b, first.url, second.url, version="v2")
    names = [path.split("/")[-1] for _, path in order]
    commits = [i for i, n in enumerate(names) if n == "commit_weight_update"]
    prepares = [i for i, n in enumerate(names) if n == "prepare_weight_update"]
    assert len(commits) == len(prepares) == 2
    assert max(prepares) < min(commits)
    assert "finish_weight_update" not in names
    serves(one, b, 1, "v2")
    serves(two, b, 2, "v2")


def test_j4_a_server_that_dies_before_prepare_keeps_all_from_committing(
    pair,
) -> None:
    one, two, a, b, commit = pair

    def die(path: str) -> bool:
        if path.endswith("prepare_weight_update"):
            kill_rank(two)
        return False

    with Relay(two.url, die) as relay:
        done = push(b, one.url, relay.url, version="v2", check=False)
    assert done.returncode == 1
    assert relay.url in done.stderr and "prepare_weight_update" in done.stderr
    kept_or_refuses(one, commit, a, 1)
    two.wait_up()
    assert two.get("/health").json["ready"] is False
    push(b, one.url, two.url, version="v3")
    serves(one, b, 1, "v3")
    serves(two, b, 2, "v3")


def test_j4_a_server_that_dies_between_prepare_and_commit_is_named(
    pair,
) -> None:
    one, two, _, b, _ = pair

    def die(path: str) -> bool:
        if path.endswith("commit_weight_update"):
            kill_rank(two)
        return False

    with Relay(two.url, die) as relay:
        done = push(b, one.url, relay.url, version="v2", check=False)
    assert done.returncode == 1, done.stderr
    assert f"committed: {one.url}; not: {relay.url}" in done.stderr
    assert "lost after prepare_weight_update" in done.stderr, done.stderr
    serves(one, b, 1, "v2")
    # It has lost the round's bytes, and must not serve older ones.
    two.wait_up()
    assert two.get("/health").json["ready"] is False
    assert two.post("/v1/completions", {"prompt": PROMPT}).code == 503
    assert two.get("/weight_info").json != {"weight_version": "v2"}
    push(b, one.url, two.url, version="v3")
    serves(two, b, 2, "v3")


def test_j4_a_server_that_vanishes_at_commit_is_named(pair) -> None:
    one, two, _, b, _ = pair

    def vanish(path: str) -> bool:
        if path.endswith("commit_weight_update"):
            two.process.kill()
            two.process.wait(10)
            return True
        return False

    with Relay(two.url, vanish) as relay:
        done = push(b, one.url, relay.url, version="v2", check=False)
    assert done.returncode in (1, 3)
    assert f"committed: {one.url}; not known: {relay.url}" in done.stderr
    serves(one, b, 1, "v2")


def test_j4_a_trainer_that_dies_between_leaves_nobody_with_the_version(
    pair,
) -> None:
    one, two, a, b, commit = pair
    reached = threading.Event()
    trainer: list[subprocess.Popen] = []

    def die(path: str) -> bool:
        if not path.endswith("commit_weight_update"):
            return False
        trainer[0].kill()
        reached.set()
        return True

    with Relay(one.url, die) as first, Relay(two.url, die) as second:
        trainer.append(subprocess.Popen(
            [FERRY, "push", str(b), first.url, second.url,
             "--weight-version", "v2"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        assert reached.wait(30)
        trainer[0].wait(10)
    for server in (one, two):
        assert server.get("/weight_info").json == {"weight_version": "v1"}
    # Both hold a prepared round; the next trainer ends it.
    push(b, one.url, two.url, version="v3")
    serves(one, b, 1, "v3")
    serves(two, b, 2, "v3")
    assert a and commit


def test_c7_a_peer_without_ferrys_routes_is_said_plainly(pair) -> None:
    one, two, _, b, _ = pair
    with Relay(two.url, hide=True) as relay:
        done = push(b, one.url, relay.url, version="v2")
        said = done.stderr.count("cannot commit as a fleet")
        assert said == 1 and "is not Ferry" in done.stderr
        assert relay.url in done.stderr
        assert "/finish_weight_update" in relay.paths
    serves(one, b, 1, "v2")
    serves(two, b, 2, "v2")


def test_replicas_of_one_server_commit_together_or_not_at_all(
    tmp_path: Path,
) -> None:
    """A replica that was lost after prepare keeps the other one from it."""
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    with Server(tmp_path / "s", a, "--kernel-format", "bf16", "--threads", "1",
                "--data-parallel-size", "2", "--commit", "staged") as server:
        push(a, server.url, version="v1")

        def die(path: str) -> bool:
            if path.endswith("commit_weight_update"):
                kill_rank(server)
            return False

        # A fleet of two names for one server would be two trainers; one that
        # asks for the two halves is enough.
        with Relay(server.url, die) as relay, Server(
            tmp_path / "t", a, "--kernel-format", "bf16", "--threads", "1"
        ) as other:
            done = push(b, relay.url, other.url, version="v2", check=False)
            assert done.returncode == 1
            assert f"committed: {other.url}; not: {relay.url}" in done.stderr
        server.wait_up()
        # Replica 1 kept v1; replica 0 came back without weights.
        status = server.status()
        assert status["weight_version"] == "v1"
        serving = [r["serving"] for r in status["replicas"]]
        assert serving == [False, True]
        assert server.generate(PROMPT, 2)["weight_versions"][0]["version"] == "v1"
        old, now = expected(a, 1, 2), server.checksums()
        assert [k for k in old if k.startswith("dp1") and now[k] != old[k]] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
