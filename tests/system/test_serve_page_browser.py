# SPDX-License-Identifier: Apache-2.0
# ctest: labels=deep timeout=600 serial
"""The page in a headless Chromium: what a reader sees while the server is
idle, during an update, and after one that failed; by keyboard, with a token,
and with a label that tries to be markup. Leaves screenshots in build/demo."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, SOURCE, Server, push  # noqa: E402
import checkpoints  # noqa: E402
import chromium  # noqa: E402

SHOTS = SOURCE / "build" / "demo"
MODEL = SOURCE / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LABEL = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'
SHOWN = "document.getElementById('data')?.hidden === false"

pytestmark = pytest.mark.skipif(
    chromium.find() is None,
    reason="needs chromium (scripts/lib/setup.sh browser)")
needs_model = pytest.mark.skipif(
    not MODEL.exists(), reason="needs SmolLM2 (scripts/lib/setup.sh model)")


def says(words: str) -> str:
    return f"document.body.innerText.includes({words!r})"


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
                "--served-model-name", "tiny-llama") as running:
        yield running


def test_idle_page_has_all_there_is_to_know(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    push(models[1], server.url, version="step-1")
    push(models[0], server.url, version="step-2", extra=("--packed",))
    with chromium.Browser(tmp_path) as browser:
        browser.open(server.url + "/ferry/")
        browser.wait_for(SHOWN)
        text = browser.text()
        for words in ("tiny-llama", "2 × 2 ranks", "Ready: all 2 replicas serve",
                      "Weight version", "step-2", "No round runs",
                      "Requests running", "Replica 0", "Replica 1", "rank 1",
                      "Transfer", "Stop", "✓ finished"):
            assert words in text, words
        rows = browser.evaluate(
            "[...document.querySelectorAll('#history tr.first')]"
            ".map(r => r.innerText.split('\\t'))")
        assert [row[0] for row in rows] == ["2", "1"]
        assert [row[2] for row in rows] == ["step-2", "step-1"]
        browser.screenshot(SHOTS / "page-ready.png")
        assert browser.console == []
        browser.open(server.url + "/ferry")
        browser.wait_for(SHOWN)
    with chromium.Browser(tmp_path / "dark", dark=True, width=480) as browser:
        browser.open(server.url + "/ferry/")
        browser.wait_for(SHOWN)
        # A narrow window scrolls its tables, not the page.
        assert browser.evaluate("document.documentElement.scrollWidth") <= 480
        browser.screenshot(SHOTS / "page-narrow-dark.png")


def test_a_label_cannot_be_more_than_text(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    push(models[1], server.url, version=LABEL)
    with chromium.Browser(tmp_path) as browser:
        browser.open(server.url + "/ferry/")
        browser.wait_for(SHOWN)
        assert browser.text().count(LABEL) >= 3
        assert browser.evaluate("window.pwned") is None
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert browser.evaluate("document.scripts.length") == 1
        # The policy would stop it even where it were markup.
        browser.evaluate("document.body.insertAdjacentHTML('beforeend', "
                         f"{LABEL!r})")
        time.sleep(0.3)
        assert browser.evaluate("window.pwned") is None
        assert any("Content Security Policy" in line for line in browser.console)
    server.post("/update_weight_version", {"new_version": "default"})


def test_it_reads_by_keyboard_and_aloud(server: Server, tmp_path: Path) -> None:
    with chromium.Browser(tmp_path) as browser:
        browser.open(server.url + "/ferry/")
        browser.wait_for(SHOWN)
        browser.key("Tab", 9)
        assert browser.evaluate("document.activeElement.className") == "skip"
        browser.key("Enter", 13)
        browser.wait_for("document.activeElement.id === 'content'")
        seen = []
        for _ in range(8):
            browser.key("Tab", 9)
            seen.append(browser.evaluate(
                "document.activeElement.getAttribute('aria-label') || "
                "document.activeElement.id"))
        assert seen[0] == "Ranks of replica 0" and "pause" in seen, seen
        nodes = browser.accessible()
        names = {name for role, name in nodes if role == "heading"}
        assert {"Now", "Running round", "Replicas and ranks",
                "Rounds that ended", "Replica 0"} <= names
        roles = [role for role, _ in nodes]
        assert roles.count("table") >= 3 and "status" in roles
        assert ("columnheader", "Result") in nodes and "rowheader" in roles
        assert "main" in roles
        # The button stops the page's questions, and its state is told.
        browser.evaluate("document.getElementById('pause').focus()")
        browser.key("Enter", 13)
        browser.wait_for("document.getElementById('pause')"
                         ".getAttribute('aria-pressed') === 'true'")


def test_changes_are_announced_and_unchanged_parts_left_alone(
    server: Server, tmp_path: Path
) -> None:
    with chromium.Browser(tmp_path) as browser:
        browser.open(server.url + "/ferry/")
        browser.wait_for(SHOWN)
        assert server.post("/start_weight_update").code == 200
        browser.wait_for("document.getElementById('live').innerText"
                         ".includes('runs: start')")
        browser.wait_for(says("waits for the trainer"))
        assert browser.evaluate("document.querySelector('[aria-current=step]')"
                                ".innerText.startsWith('… start')")
        assert server.post("/ferry/abort_weight_update").code == 200
        browser.wait_for("document.getElementById('live').innerText"
                         ".includes('No round runs')")
        browser.wait_for(says("aborted by the trainer"))
        browser.evaluate("void (window.kept = "
                         "document.querySelector('#history table'))")
        browser.evaluate("document.querySelector('#history summary').click()")
        time.sleep(2.5)
        assert browser.evaluate("window.kept.isConnected")
        # A new round makes the table anew; what was open stays open.
        assert server.post("/start_weight_update").code == 200
        assert server.post("/ferry/abort_weight_update").code == 200
        browser.wait_for("!window.kept.isConnected")
        assert browser.evaluate(
            "[...document.querySelectorAll('#history details')]"
            ".map(d => d.open).slice(0, 3)") == [False, True, False]


def test_it_asks_for_the_token_and_keeps_it_in_the_tab(
    models: list[Path], tmp_path: Path
) -> None:
    with Server(tmp_path / "s", models[0], "--api-key", "open-sesame") as server:
        with chromium.Browser(tmp_path / "c") as browser:
            browser.open(server.url + "/ferry/")
            browser.wait_for("document.activeElement?.id === 'token'")
            browser.screenshot(SHOTS / "page-token.png")
            browser.type("wrong")
            browser.key("Enter", 13)
            browser.wait_for(says("The token was refused."))
            assert browser.evaluate(
                "Object.keys(sessionStorage).length === 0")
            browser.type("open-sesame")
            browser.key("Enter", 13)
            browser.wait_for(SHOWN)
            assert browser.evaluate("location.href.includes('sesame')") is False
            assert browser.evaluate("document.cookie + "
                                    "Object.keys(localStorage).length") == "0"
            browser.open(server.url + "/ferry/")
            browser.wait_for(SHOWN)


def test_it_says_when_the_server_is_gone(
    models: list[Path], tmp_path: Path
) -> None:
    with Server(tmp_path / "s", models[0]) as server:
        with chromium.Browser(tmp_path / "c") as browser:
            browser.open(server.url + "/ferry/")
            browser.wait_for(SHOWN)
            server.stop()
            browser.wait_for(says("No answer from the server"))
            assert "Last known" in browser.text()
            browser.screenshot(SHOTS / "page-gone.png")


def stop_within_update(server: Server, pusher: subprocess.Popen[str]) -> None:
    """Stops the trainer when some, but not all, of its bytes are there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        running = server.status()["round"]
        if running and running["phase"] == "update" and (
                0.3 * running["bytes_declared"] < running["bytes_received"]
                < running["bytes_declared"]):
            pusher.send_signal(signal.SIGSTOP)
            return
        assert pusher.poll() is None, pusher.communicate()
    raise AssertionError("no update was seen")


@needs_model
@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_an_update_is_seen_while_it_runs_and_after_it_failed(
    commit: str, tmp_path: Path
) -> None:
    with Server(tmp_path / "s", MODEL, "--load-format", "dummy",
                "--tensor-parallel-size", "3", "--max-model-len", "256",
                "--threads", "1", "--commit", commit,
                "--served-model-name", "SmolLM2-135M-Instruct") as server:
        with chromium.Browser(tmp_path / "c") as browser:
            browser.open(server.url + "/ferry/")
            browser.wait_for(says("no weights yet"))
            assert "✗ Not ready: 0 of 1 replica serves" in browser.text()
            push(MODEL, server.url, version="demo-1")
            browser.wait_for(says("Ready: the replica serves"))
            pusher = subprocess.Popen(
                [FERRY, "push", str(MODEL), server.url, "--weight-version",
                 "demo-2", "--init-info", '{"path":"ring"}'],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                stop_within_update(server, pusher)
                browser.wait_for(says("Progress of each rank"))
                text = browser.text()
                assert "▶ update" in text and "○ commit" in text
                assert ("Generation stands" in text) == (commit == "inplace")
                stopped = "generation ‖ stopped for" in text
                assert stopped == (commit == "inplace")
                assert ("generation ✓ goes on" in text) != stopped
                parts = browser.evaluate(
                    "[...document.querySelectorAll('#round table progress')]"
                    ".map(p => p.value)")
                assert len(parts) == 3 and all(0 < p < 1 for p in parts)
                browser.screenshot(SHOTS / f"page-update-{commit}.png")
            finally:
                pusher.kill()
                pusher.communicate(timeout=20)
            browser.wait_for(says("Last update failed"), timeout=60)
            browser.wait_for("document.querySelectorAll("
                             "'#history tr.first').length === 2")
            row = browser.evaluate("document.querySelector("
                                   "'#history tbody').innerText")
            assert "✗ failed" in row and "✗ Error: replica 0 rank" in row
            ready = "Ready: the replica serves" in browser.text()
            assert ready == (commit == "staged")
            browser.screenshot(SHOTS / f"page-failed-{commit}.png")


if __name__ == "__main__":
    if chromium.find() is None:
        print("skipped: needs chromium (scripts/lib/setup.sh browser)")
        sys.exit(77)
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
