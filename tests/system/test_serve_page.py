# SPDX-License-Identifier: Apache-2.0
"""What the server says of its rounds: the history in /ferry/status, the page
and its policy, the metrics' text format (J3). How the page behaves in a
browser is in test_serve_page_browser.py."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, push  # noqa: E402
import checkpoints  # noqa: E402

LABEL = 'a"b\\c\nd <img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in "ab"]
    for seed, folder in enumerate(folders):
        checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed + 1,
                         dtype="BF16")
    return folders


@pytest.fixture(scope="module")
def server(models: list[Path],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("serve"), models[0],
                "--tensor-parallel-size", "2", "--data-parallel-size", "2",
                "--max-num-seqs", "2") as running:
        yield running


def status_of(server: Server) -> dict:
    """The status with all rounds whole."""
    return server.get("/ferry/status?history=64").json


def page(server: Server, token: str | None = None) -> tuple[str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("GET", "/ferry/", headers=headers)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    assert reply.status == 200
    return text, {k.lower(): v for k, v in reply.getheaders()}


# ---- history ----


def test_history_keeps_rounds_with_transfer_and_stop_apart(
    server: Server, models: list[Path]
) -> None:
    before = time.time()
    earlier = status_of(server)
    assert earlier["history"] == [] and earlier["round"] is None
    push(models[1], server.url, version="one")
    push(models[0], server.url, version="two", extra=("--packed",))
    status = status_of(server)
    assert [h["version"] for h in status["history"]] == ["one", "two"]
    for number, h in enumerate(status["history"], 1):
        assert (h["number"], h["result"], h["error"]) == (number, "finished", None)
        assert before - 1 < h["started_at"] < time.time() + 1
        assert 0 < h["transfer_ms"] < h["total_ms"]
        assert 0 < h["stop_ms"] <= h["total_ms"]
        assert h["bytes"]["declared"] == h["bytes"]["received"] > 0
        assert h["bytes"]["loaded"] > 0
        assert [(k["replica"], k["rank"]) for k in h["ranks"]] == [
            (0, 0), (0, 1), (1, 0), (1, 1)]
        assert h["bytes"]["loaded"] == sum(k["bytes_loaded"] for k in h["ranks"])
        for rank in h["ranks"]:
            assert rank["answered"] and rank["failure"] is None
            assert rank["update_ms"] > 0 and rank["path"] == h["path"]
        names = [call["phase"] for call in h["calls"]]
        assert names == ["start", "update", "prepare", "commit"]
        for call in h["calls"]:
            assert len(call["ranks_ms"]) == 4
            assert max(call["ranks_ms"]) <= call["ms"] <= h["total_ms"]
    assert status["last_stop_ms"] == pytest.approx(
        status["history"][-1]["stop_ms"])


def test_a_running_round_tells_its_phase_and_a_failed_one_its_error(
    server: Server, models: list[Path]
) -> None:
    rounds = len(status_of(server)["history"])
    assert server.post("/start_weight_update").code == 200
    running = status_of(server)["round"]
    assert running["phase"] == "start" and not running["in_call"]
    assert not running["stopped"] and running["elapsed_ms"] >= 0
    assert running["number"] == rounds + 1
    assert "ferry:round_running 1" in server.get("/metrics").text
    assert server.post("/ferry/abort_weight_update").code == 200
    status = status_of(server)
    assert status["round"] is None
    ended = status["history"][-1]
    assert len(status["history"]) == rounds + 1
    assert ended["result"] == "failed" and ended["version"] is None
    assert "aborted" in ended["error"]
    # A draft that is refused is no round.
    assert server.post("/start_draft_weight_update").code == 501
    assert len(status_of(server)["history"]) == rounds + 1
    push(models[1], server.url, version="three")
    assert status_of(server)["history"][-1]["number"] == rounds + 2


def test_updates_of_one_round_are_told_apart(
    server: Server, models: list[Path]
) -> None:
    push(models[0], server.url, version="many", extra=(
        "--init-info", '{"packed":true,"packed_buffer_size_bytes":9000}'))
    last = status_of(server)["history"][-1]
    names = [call["phase"] for call in last["calls"]]
    assert names[-2:] == ["prepare", "commit"]
    updates = [call for call in last["calls"] if call["phase"] == "update"]
    assert 2 < len(updates) == len(names) - 3
    assert all(a["at_ms"] + a["ms"] <= b["at_ms"] + 0.001
               for a, b in zip(updates, updates[1:]))
    assert sum(call["ms"] for call in updates) == pytest.approx(
        last["phases"]["update_ms"])


def test_history_is_bounded(server: Server) -> None:
    first = status_of(server)
    for _ in range(66):
        assert server.post("/start_weight_update").code == 200
        assert server.post("/finish_weight_update").code == 200
    history = status_of(server)["history"]
    assert len(history) == 64
    short = server.status()
    assert len(short["history"]) == 16
    assert not any("ranks" in h or "calls" in h for h in short["history"])
    assert short["history"][-1]["number"] == history[-1]["number"]
    # Clients read it into buffers of a fixed size.
    assert len(server.get("/ferry/status").text) < 32768
    assert server.get("/ferry/status?history=0").json["history"] == []
    numbers = [h["number"] for h in history]
    last = first["history"][-1]["number"] + 66
    assert numbers == list(range(last - 63, last + 1))


# ---- the page ----


def test_the_page_brings_its_own_policy_and_nothing_from_outside(
    server: Server
) -> None:
    text, headers = page(server)
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1)
                  for part in headers["content-security-policy"].split("; "))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        inner = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)
        assert inner is not None and text.count(f"<{tag}") == 1
        digest = base64.b64encode(
            hashlib.sha256(inner.group(1).encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert not re.search(r"(https?:)?//[a-z]", text)
    assert not re.search(r"\bon[a-z]+=|style=|innerHTML|insertAdjacentHTML|"
                         r"document\.write|\beval\(", text)


def test_the_page_is_open_and_its_data_is_not(
    models: list[Path], tmp_path: Path
) -> None:
    with Server(tmp_path, models[0], "--api-key", "s3cret") as server:
        text, _ = page(server)
        assert "s3cret" not in text and models[0].name not in text
        assert server.get("/ferry/status").code == 401
        assert server.get("/ferry/status", token="s3cret").code == 200
        assert server.get("/metrics").code == 401


# ---- logs ----


def test_logs_are_json_lines_where_asked_for(
    models: list[Path], tmp_path: Path
) -> None:
    with Server(tmp_path, models[0], "--tensor-parallel-size", "2",
                env={"FERRY_LOG_FORMAT": "json", "FERRY_LOG_LEVEL": "debug"}) as server:
        assert server.post("/start_weight_update").code == 200
        assert server.post("/update_weights", {"update_info": {}}).code == 409
        server.stop()
        lines = server.log().splitlines()
    said = [line for line in lines if line.startswith("ferry: serving")]
    assert len(said) == 1  # standard output, for whoever started it
    records = [json.loads(line) for line in lines if line not in said]
    assert records and all(
        list(record) == ["time", "level", "message"] for record in records)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", r["time"])
               for r in records)
    failed = [r for r in records if "weight update failed" in r["message"]]
    # Each of the ranks says it, and the API process.
    assert sorted(r["level"] for r in failed) == ["error", "warn", "warn"]
    # The first rank's failure ends the other's update, which may say that.
    assert all("init_weight_transfer_engine" in r["message"]
               or r["level"] == "warn" and "aborted" in r["message"]
               for r in failed)
    assert sum("init_weight_transfer_engine" in r["message"]
               for r in failed) >= 2


# ---- metrics ----

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABELS = r'(?:\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*\})?'
SAMPLE = re.compile(rf"({NAME})({LABELS}) ([-+]?[0-9.]+(?:e[-+]?\d+)?|\+Inf|NaN)")
PART = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\["\\n])*)"')


def parse_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Reads the text format strictly; asserts what promtool checks."""
    kinds: dict[str, str] = {}
    helps: set[str] = set()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    closed: set[str] = set()
    current = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helps, f"HELP of {name} twice"
            assert len(line.split(" ", 3)[3]) > 5
            helps.add(name)
            closed.add(current)
            current = name
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current and name not in kinds, line
            assert kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            family = re.sub(r"_(bucket|sum|count)$", "", name) if (
                kinds.get(current) == "histogram") else name
            assert family == current and family not in closed, line
            if kinds[family] == "counter":
                assert name.endswith("_total"), name
                assert float(value) >= 0
            found = {
                k: v.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")
                for k, v in PART.findall(labels)}
            keys = [tuple(sorted(s[0].items())) for s in samples.get(name, [])]
            assert tuple(sorted(found.items())) not in keys, f"twice: {line}"
            samples.setdefault(name, []).append((found, float(value)))
    assert helps == set(kinds)
    return samples


def test_metrics_parse_with_names_of_vllm_and_phases_of_rounds(
    server: Server, models: list[Path]
) -> None:
    before = parse_metrics(server.get("/metrics").text)
    push(models[1], server.url, version="counted")
    after = parse_metrics(server.get("/metrics").text)
    last = status_of(server)["history"][-1]

    def grown(name: str, **labels: str) -> float:
        pick = [dict(s for s in [(str(sorted(k.items())), v) for k, v in m[name]])
                [str(sorted(labels.items()))] for m in (before, after)]
        return pick[1] - pick[0]

    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting",
                 "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
                 "vllm:rl_weight_update_operations_in_flight",
                 "vllm:rl_weight_update_operation_duration_seconds_bucket"):
        assert name in after
    for phase in ("start", "update", "prepare", "commit"):
        assert grown("ferry:round_phase_seconds_total", phase=phase) == (
            pytest.approx(last["phases"][f"{phase}_ms"] / 1e3, rel=1e-3))
    for kind in ("declared", "received", "loaded"):
        assert grown("ferry:round_bytes_total", kind=kind) == last["bytes"][kind]
    assert grown("ferry:rounds_finished_total") == 1
    assert after["ferry:weight_version_info"] == [({"version": "counted"}, 1.0)]
    assert after["ferry:replica_ready"] == [
        ({"replica": "0"}, 1.0), ({"replica": "1"}, 1.0)]


def test_metrics_escape_the_label_of_the_weights(server: Server) -> None:
    try:
        assert server.post("/update_weight_version", {"new_version": LABEL}).code == 200
        parsed = parse_metrics(server.get("/metrics").text)
        assert parsed["ferry:weight_version_info"] == [({"version": LABEL}, 1.0)]
        assert status_of(server)["weight_version"] == LABEL
    finally:
        server.post("/update_weight_version", {"new_version": "default"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
