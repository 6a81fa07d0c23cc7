# SPDX-License-Identifier: Apache-2.0
"""`ferry push --trace`: the file is what chrome://tracing and Perfetto read,
its tracks lie where the work was, and a server that cannot tell, or has
another clock, is said to."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, ferry, push  # noqa: E402
import checkpoints  # noqa: E402

SLACK = 3000.0  # microseconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=1, dtype="BF16")
    return folder


@pytest.fixture(scope="module")
def server(model: Path,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("serve"), model, "--kernel-format", "q8_0",
                "--tensor-parallel-size", "2") as running:
        yield running


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Trace:
    """A trace that was read and checked against the format."""

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text())
        assert isinstance(events, list) and events
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.spans: list[dict[str, Any]] = []
        for event in events:
            assert isinstance(event["name"], str) and event["name"]
            assert type(event["pid"]) is int and type(event["tid"]) is int
            assert isinstance(event["args"], dict)
            if event["ph"] == "M":
                self._metadata(event)
            else:
                assert event["ph"] == "X", event
                assert set(event) == {
                    "name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
                assert is_number(event["ts"]) and is_number(event["dur"])
                assert event["dur"] >= 0 and event["ts"] > -SLACK
                self.spans.append(event)
        for event in self.spans:
            assert event["pid"] in self.processes
            assert (event["pid"], event["tid"]) in self.threads
        self._no_overlap()

    def _metadata(self, event: dict[str, Any]) -> None:
        if event["name"] == "process_name":
            assert event["pid"] not in self.processes
            self.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            key = (event["pid"], event["tid"])
            assert key not in self.threads
            self.threads[key] = event["args"]["name"]
        else:
            assert event["name"] == "thread_sort_index"

    def _no_overlap(self) -> None:
        """What is on one track follows one another, as viewers want it."""
        for key in self.threads:
            at = float("-inf")
            for event in sorted(self.of(*key), key=lambda e: e["ts"]):
                assert event["ts"] >= at - 1, event
                at = event["ts"] + event["dur"]

    def of(self, pid: int, tid: int) -> list[dict[str, Any]]:
        return [e for e in self.spans if (e["pid"], e["tid"]) == (pid, tid)]

    def track(self, name: str, pid: int | None = None) -> list[dict[str, Any]]:
        keys = [k for k, v in self.threads.items()
                if v == name and (pid is None or k[0] == pid)]
        assert len(keys) == 1, (name, self.threads)
        return self.of(*keys[0])


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return (inner["ts"] > outer["ts"] - SLACK and inner["ts"] + inner["dur"]
            < outer["ts"] + outer["dur"] + SLACK)


def test_a_trace_shows_trainer_and_every_rank_where_the_work_was(
    server: Server, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    done = push(model, server.url, version="traced", extra=(
        "--trace", str(path), "--rounds", "2", "--json"))
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    trace = Trace(path)
    assert trace.processes[1].startswith("ferry push (pid ")
    assert trace.processes[2] == server.url
    mine, theirs = trace.track("round", 1), trace.track("round", 2)
    assert [e["name"] for e in mine] == ["round 1", "round 2"]
    assert len(theirs) == 2
    for outer, other, stats in zip(mine, theirs, rounds):
        assert outer["dur"] / 1e3 == pytest.approx(stats["total_ms"], abs=0.1)
        assert outer["args"]["status"] == "OK"
        assert other["args"]["result"] == "finished"
        assert other["args"]["version"] == "traced"
        assert other["args"]["clock"] == "as the trainer's"
        assert other["args"]["stop_ms"] > 0
        assert inside(other, outer)
    for phase in ("start", "gather", "wire", "digest", "finish"):
        spans = [e for e in trace.track(phase, 1) if inside(e, mine[0])
                 and e["ts"] < mine[1]["ts"] - SLACK or inside(e, mine[1])]
        assert spans and {e["name"] for e in spans} == {phase}
        busy = sum(e["args"]["busy_ms"] for e in trace.track(phase, 1))
        assert busy == pytest.approx(
            sum(r[f"{phase}_ms"] for r in rounds), rel=0.05, abs=0.2)
    for rank in ("replica 0 rank 0", "replica 0 rank 1"):
        calls = trace.track(rank, 2)
        assert [e["name"] for e in calls] == [
            "start", "update", "prepare", "commit"] * 2
        assert all(e["args"]["answered"] for e in calls)
        updates = [e for e in calls if e["name"] == "update"]
        work = trace.track(f"{rank}: quantise", 2) + trace.track(f"{rank}: load", 2)
        assert {e["name"] for e in work} == {"quantise", "load"}
        for e in work:
            assert any(inside(e, update) for update in updates), e
            assert 0 < e["args"]["busy_ms"] <= e["dur"] / 1e3 + 0.01


def test_a_round_that_failed_is_in_the_trace_with_its_error(
    server: Server, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    other = tmp_path / "other"
    checkpoints.make(str(other), arch="llama", variant="tied", seed=1, dtype="BF16")
    done = push(other, server.url, extra=("--trace", str(path)), check=False)
    assert done.returncode == 1
    trace = Trace(path)
    (mine,) = trace.track("round", 1)
    assert mine["args"]["status"] != "OK" and mine["args"]["error"]
    assert mine["args"]["error"] in done.stderr
    (theirs,) = trace.track("round", 2)
    assert theirs["args"]["result"] == "failed" and theirs["args"]["error"]


def test_a_file_that_cannot_be_written_is_found_before_anything_is_sent(
    server: Server, model: Path, tmp_path: Path
) -> None:
    rounds = server.status()["rounds_finished"]
    done = push(model, server.url, check=False,
                extra=("--trace", str(tmp_path / "no" / "such" / "folder")))
    assert done.returncode == 1 and "no/such/folder" in done.stderr
    assert server.status()["rounds_finished"] == rounds


class Proxy:
    """Passes requests on; `change` sees each status, None hides it."""

    def __init__(self, url: str, change: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size) if self.command == "POST" else None
                code, data = 404, b"{}"
                hidden = self.path.startswith("/ferry/status") and change is None
                if not hidden:
                    request = urllib.request.Request(
                        url + self.path, data=body, method=self.command,
                        headers={"Content-Type": "application/json"})
                    try:
                        with urllib.request.urlopen(request, timeout=60) as reply:
                            code, data = reply.status, reply.read()
                    except urllib.error.HTTPError as error:
                        code, data = error.code, error.read()
                if self.path.startswith("/ferry/status") and change:
                    data = json.dumps(change(json.loads(data))).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> "Proxy":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()


def test_a_server_with_another_clock_is_shifted_and_says_so(
    server: Server, model: Path, tmp_path: Path
) -> None:
    def change(status: dict[str, Any]) -> dict[str, Any]:
        status["time"] += 5000
        for record in status["history"]:
            record["started_at"] += 5000
        for replica in status["replicas"]:
            for rank in replica["ranks"]:
                for span in rank.get("spans", []):
                    span["at"] += 5000
        return status

    path = tmp_path / "trace.json"
    with Proxy(server.url, change) as proxy:
        push(model, proxy.url, extra=("--trace", str(path)))
    trace = Trace(path)
    (mine,), (theirs,) = trace.track("round", 1), trace.track("round", 2)
    words = theirs["args"]["clock"].split()
    assert words[:2] == ["shifted", "by"] and words[3] == "ms"
    assert float(words[2]) == pytest.approx(-5000e3, abs=100)
    # The time of asking bounds how well the clocks can be compared.
    assert abs(theirs["ts"] - mine["ts"]) < 100e3
    assert trace.track("replica 0 rank 1: quantise", 2)


def test_a_server_that_is_no_ferry_is_named_and_the_trainer_traced(
    server: Server, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with Proxy(server.url, None) as proxy:
        done = push(model, proxy.url, extra=("--trace", str(path), "--rounds", "2"))
    assert done.stderr.count("does not tell its rounds") == 1
    assert proxy.url in done.stderr
    trace = Trace(path)
    assert list(trace.processes) == [1] and len(trace.track("round")) == 2


def test_help_names_the_flag() -> None:
    assert "--trace FILE" in ferry("push", "--help").stdout


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
