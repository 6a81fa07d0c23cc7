# SPDX-License-Identifier: Apache-2.0
"""The reinforcement-learning example against a server of its own.

ctest: timeout=300

Short runs of small rounds; what the loop claims of itself is read from the
numbers in its page.
"""

from __future__ import annotations

import html.parser
import json
import os
import pathlib
import re
import signal
import subprocess
import time
from typing import Any

import pytest

LOOP = pathlib.Path(os.environ["FERRY_BUILD_DIR"]) / "examples" / "rl_loop"
SMALL = ["--prompts", "8", "--group", "8"]

pytestmark = pytest.mark.skipif(
    not LOOP.exists(), reason="examples/rl_loop is not built"
)


def loop(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the loop, at most a minute."""
    return subprocess.run(
        [str(LOOP), "--dir", str(folder), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )


def rounds(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The numbers of every round, from the page."""
    page = (folder / "rl_loop.html").read_text()
    found = re.search(r'id="rounds">(.*?)</script>', page, re.S)
    assert found is not None
    rows: list[dict[str, Any]] = json.loads(found.group(1))
    return rows


def mean(rows: list[dict[str, Any]], key: str = "reward") -> float:
    """Mean of a column."""
    return float(sum(row[key] for row in rows)) / len(rows)


def wait_gone(pattern: str) -> None:
    """Until no process has `pattern` in its command line."""
    deadline = time.monotonic() + 15
    while True:
        left = [
            pid
            for pid in os.listdir("/proc")
            if pid.isdigit() and pattern in command_line(pid)
        ]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def command_line(pid: str) -> str:
    """Of a process; empty when it is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_gradients_and_checkpoint(tmp_path: pathlib.Path) -> None:
    done = loop(tmp_path, "--self-test")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gradient ") == 21


def test_wrong_arguments_are_named(tmp_path: pathlib.Path) -> None:
    for args, words in (
        (["--rounds", "0"], "--rounds takes"),
        (["--sorcery"], "unknown option --sorcery"),
        (["--commit", "later"], "inplace or staged"),
        (["extra"], "unexpected argument extra"),
    ):
        done = loop(tmp_path, *args)
        assert done.returncode == 2
        assert words in done.stderr


class Outside(html.parser.HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.plots = 0

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        """Note a tag's addresses."""
        self.plots += tag == "svg"
        self.found += [
            str(value)
            for name, value in attrs
            if name in ("src", "href") and not str(value).startswith("#")
        ]


def test_learns_and_reports(tmp_path: pathlib.Path) -> None:
    """H2: every token is stamped with the version that made it."""
    done = loop(tmp_path, *SMALL, "--rounds", "50", "--rate", "0.005")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rounds(tmp_path)
    assert [row["round"] for row in rows] == list(range(50))
    assert mean(rows[-5:]) > mean(rows[:5]) + 0.1
    for row in rows:
        assert row["age_0"] == row["tokens"] == row["checked"]
        assert row["oldest"] == row["newest"] == row["round"]
        assert 0 <= row["drift"] < 1e-3
        # Four ranks; each reads its share of the weights at least once.
        assert row["bytes"] > 2 * 70000 * 4
    page = Outside()
    page.feed((tmp_path / "rl_loop.html").read_text())
    assert page.found == [] and page.plots >= 6
    wait_gone(str(tmp_path / "model"))


def test_without_sync_it_stays_at_chance(tmp_path: pathlib.Path) -> None:
    done = loop(
        tmp_path, *SMALL, "--rounds", "30", "--rate", "0.005", "--no-sync"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rounds(tmp_path)
    assert all(row["newest"] == 0 for row in rows)
    assert mean(rows[-5:]) < 0.12
    assert rows[-1]["dropped"] == rows[-1]["tokens"]


def test_the_oracle_finds_a_changed_weight(tmp_path: pathlib.Path) -> None:
    done = loop(tmp_path, *SMALL, "--rounds", "20", "--spoil", "3")
    assert done.returncode == 1
    assert "round 4: EMISMATCH: the worker has drifted" in done.stderr
    assert "version step-4" in done.stderr
    assert len(rounds(tmp_path)) == 4
    wait_gone(str(tmp_path / "model"))


@pytest.mark.parametrize("commit", ["staged", "inplace"])
def test_rollouts_go_on_through_updates(
    tmp_path: pathlib.Path, commit: str
) -> None:
    """H4: answers in flight keep the version that made each token."""
    done = loop(
        tmp_path, *SMALL, "--rounds", "30", "--async", "--commit", commit
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rounds(tmp_path)
    for row in rows:
        ages = [row[f"age_{age}"] for age in range(4)]
        assert sum(ages) == row["tokens"]
        assert row["weighted"] + row["dropped"] == row["tokens"] - ages[0]
        assert row["newest"] <= row["round"]
    assert sum(row["age_1"] for row in rows) > 0
    assert all(row["drift"] < 1e-3 for row in rows)
    assert sum(row["checked"] for row in rows) > 0


def test_killed_it_goes_on_as_if_never_killed(tmp_path: pathlib.Path) -> None:
    """The rounds after a kill equal those of a run that was left alone."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    few = [*SMALL, "--rounds", "16", "--save-every", "3"]
    assert loop(whole, *few).returncode == 0
    process = subprocess.Popen(
        [str(LOOP), "--dir", str(killed), *few, "--rounds", "100000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round    7"):
            break
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    wait_gone(str(killed / "model"))
    done = loop(killed, *few, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at round " in done.stdout
    ours, theirs = rounds(killed), rounds(whole)
    assert len(ours) == len(theirs) == 16
    for key in ("reward", "tokens", "norm"):
        assert [row[key] for row in ours] == [row[key] for row in theirs]


def test_a_signal_ends_it_with_a_checkpoint(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        [str(LOOP), "--dir", str(tmp_path), *SMALL, "--rounds", "100000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round    2"):
            break
    process.send_signal(signal.SIGTERM)
    process.stdout.read()
    assert process.wait(30) == 130
    process.stdout.close()
    assert (tmp_path / "checkpoint.safetensors").exists()
    wait_gone(str(tmp_path / "model"))
    other = loop(tmp_path, *SMALL, "--resume", "--seed", "9")
    assert other.returncode == 1
    assert "made with seed 1, not 9" in other.stderr
