# SPDX-License-Identifier: Apache-2.0
"""serve, push, generate, verify: the program against itself on tiny models.

ctest: timeout=240

What a server stores is also compared with digests that NumPy predicts from
the checkpoint alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

FERRY = os.environ["FERRY_BIN"]
REFERENCE = pathlib.Path(os.environ["FERRY_SOURCE_DIR"]) / "tests/reference"


def ferry(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the program, at most a minute."""
    return subprocess.run(
        [FERRY, *args], capture_output=True, text=True, timeout=60
    )


def reference(script: str, *args: str) -> str:
    """Run one of the NumPy references and return what it prints."""
    return subprocess.run(
        [sys.executable, str(REFERENCE / script), *args],
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints of one shape with other weights."""
    out = []
    for seed in "01":
        folder = str(tmp_path_factory.mktemp("model"))
        reference(
            "checkpoints.py", folder, "--arch", "llama", "--seed", seed
        )
        out.append(folder)
    return out


@contextlib.contextmanager
def serving(model: str, folder: pathlib.Path, *args: str) -> Iterator[str]:
    """Run `ferry serve` and yield its address."""
    port_file = folder / "port"
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [FERRY, "serve", model, "--host", "127.0.0.1", "--port", "0",
             "--threads", "1"]
            + ["--port-file", str(port_file), "--max-model-len", "128"]
            + ["--weight-transfer-config", '{"backend":"ipc"}', *args],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().strip()):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0, (folder / "log").read_text()
    finally:
        server.kill()
        server.wait()


def checksums(url: str) -> Any:
    """Ask a server for its stored digests, without the program."""
    request = urllib.request.Request(
        url + "/weight_checker",
        data=b'{"action":"checksum"}',
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)["checksums"]


def test_a_push_changes_what_is_served_and_verify_proves_it(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    old, new = models
    args = ["--tensor-parallel-size", "2", "--kernel-format", "bf16"]
    with serving(old, tmp_path, *args) as url:
        ask = ["generate", "--url", url, "--token-ids", "5,6,7", "--json"]
        ask += ["--temperature", "0", "--max-tokens", "4"]
        before = json.loads(ferry(*ask).stdout)["choices"][0]

        done = ferry("verify", new, url)
        assert done.returncode == 1
        assert re.search(r"first dp0:pp0:pcp0:tp0:\S+", done.stdout)
        assert ferry("verify", old, url).returncode == 0

        done = ferry("push", new, url, "--weight-version", "v1", "--json")
        assert done.returncode == 0, done.stderr
        stats = json.loads(done.stdout)
        assert stats["status"] == "OK" and stats["round"] == 1
        assert stats["n_params"] == 21 and stats["path"]
        assert stats["weight_version"] == "v1"
        assert stats["total_ms"] > 0

        expected = json.loads(
            reference(
                *["stored.py", new, "--tp", "2", "--kernel-format", "bf16"]
            )
        )
        assert checksums(url) == expected
        done = ferry("verify", new, url, "--json")
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["match"] is True and seen["different"] == 0
        assert seen["matched"] == len(expected)
        assert [(r["dp"], r["tp"]) for r in seen["ranks"]] == [(0, 0), (0, 1)]

        after = json.loads(ferry(*ask).stdout)["choices"][0]
        assert after["token_ids"] != before["token_ids"]
        assert after["weight_versions"] == [
            {"version": "v1", "start": 0, "end": 4}
        ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--shared"],
        ["--packed"],
        ["--pause"],
        ["--init-info", '{"path":"ring"}'],
    ],
)
def test_every_way_of_pushing_ends_in_the_same_bytes(
    models: list[str], tmp_path: pathlib.Path, flags: list[str]
) -> None:
    old, new = models
    with serving(old, tmp_path) as url:
        done = ferry(
            "push", new, url, "--dtype", "f16", "--rounds", "2", *flags
        )
        assert done.returncode == 0, done.stderr
        rounds = re.findall(r"^round (\d): 21 parameters", done.stdout, re.M)
        assert rounds == ["1", "2"]
        if "--shared" in flags:
            assert "path shared" in done.stdout
        if "--init-info" in flags:
            assert "path ring" in done.stdout
        assert ferry("verify", new, url, "--dtype", "f16").returncode == 0
        # Rounding shows: these are not the digests of the f32 weights.
        assert ferry("verify", new, url).returncode == 1


def test_push_reaches_several_servers(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    old, new = models
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        serving(old, tmp_path / "a", "--data-parallel-size", "2") as a,
        serving(old, tmp_path / "b") as b,
    ):
        done = ferry("push", new, a, b + "/")
        assert done.returncode == 0, done.stderr
        for url in (a, b):
            done = ferry("verify", new, url)
            assert done.returncode == 0, done.stdout + done.stderr


def test_a_token_is_needed_where_one_is_set(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    old, new = models
    with serving(old, tmp_path, "--api-key", "secret") as url:
        done = ferry("push", new, url)
        assert done.returncode == 1
        assert "EAUTH" in done.stderr and "secret" not in done.stderr
        assert ferry("push", new, url, "--token", "secret").returncode == 0
        done = ferry("verify", new, url, "--token", "secret")
        assert done.returncode == 0, done.stdout + done.stderr
        done = ferry(
            *["generate", "--url", url, "--token", "secret"],
            *["--prompt", "the", "--max-tokens", "3", "--logprobs", "2"],
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) >= 4
        assert "3 tokens, finish length" in done.stderr


def test_a_model_of_another_shape_is_refused_by_name(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    other = tmp_path / "other"
    reference(
        *["checkpoints.py", str(other), "--arch", "llama"],
        *["--variant", "wide-head"],
    )
    with serving(models[0], tmp_path) as url:
        done = ferry("push", str(other), url)
        assert done.returncode == 1
        assert "self_attn.q_proj.weight" in done.stderr
        # The server kept what it had, and takes the next round.
        assert ferry("verify", models[0], url).returncode == 0
        assert ferry("push", models[1], url).returncode == 0


def test_an_interrupted_push_leaves_the_server_whole(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    with serving(models[0], tmp_path) as url:
        push = subprocess.Popen(
            [FERRY, "push", models[1], url, "--rounds", "1000000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert push.stdout is not None
            # One line of the source, two of a round.
            for _ in range(3):
                assert push.stdout.readline()
            push.send_signal(signal.SIGINT)
            _, errors = push.communicate(timeout=20)
        finally:
            push.kill()
            push.wait()
        assert push.returncode == 1
        assert "(ECANCELED)" in errors
        done = ferry("push", models[1], url)
        assert done.returncode == 0, errors[-300:] + done.stderr
        assert ferry("verify", models[1], url).returncode == 0


def test_a_terminal_gets_a_bar_and_a_pipe_plain_lines(
    models: list[str], tmp_path: pathlib.Path
) -> None:
    with serving(models[0], tmp_path) as url:
        ours, theirs = pty.openpty()
        push = subprocess.Popen(
            [FERRY, "push", models[1], url],
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        drawn = b""
        # The other end of a terminal that was closed reads as an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                drawn += part
        os.close(ours)
        text, _ = push.communicate(timeout=20)
        assert push.returncode == 0
        assert b"round 1 [####" in drawn and b"GB/s" in drawn
        assert drawn.endswith(b"\r\x1b[K")  # the bar is wiped
        assert b"#" not in text and b"GB/s" in text

        done = ferry("push", models[1], url)
        assert "round 1: 100 % after" in done.stderr
        assert "[" not in done.stderr and "\x1b" not in done.stderr
        done = ferry("push", models[1], url, "--weight-version", "v\x1b2")
        assert ", version v\\x1b2\n" in done.stdout
        done = ferry("push", models[1], url, "--json")
        assert done.stderr == ""
