# SPDX-License-Identifier: Apache-2.0
"""The program's face: help, exit codes, info and inspect.

What a command shows of a checkpoint is compared with what Python reads from
the file itself.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import struct
import subprocess
import sys
from typing import Any

import pytest

FERRY = os.environ["FERRY_BIN"]
SOURCE = pathlib.Path(os.environ["FERRY_SOURCE_DIR"])
COMMANDS = ["serve", "push", "generate", "info", "inspect", "verify"]
BUILT_IN = ["nccl", "ipc", "sparse_nccl", "sharded_rdt"]
PROVIDERS = ["tcp", "ucx", "nccl"]


def ferry(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the program, at most half a minute."""
    return subprocess.run(
        [FERRY, *args], capture_output=True, text=True, timeout=30, **more
    )


def closed_port() -> int:
    """Return a port of this host on which nobody listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def make_checkpoint(folder: pathlib.Path, *args: str) -> pathlib.Path:
    """Make a tiny checkpoint in a folder of its own."""
    script = SOURCE / "tests" / "reference" / "checkpoints.py"
    subprocess.run(
        [sys.executable, str(script), str(folder), *args],
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny Llama checkpoint in bf16."""
    folder = tmp_path_factory.mktemp("llama")
    return make_checkpoint(folder, "--arch", "llama", "--dtype", "bf16")


def header(path: pathlib.Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries: dict[str, Any] = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__", None)
    return entries


def one_line(text: str) -> str:
    """Return the only line of text."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


# ---- help and exit codes --------------------------------------------------


def test_help_names_every_command_and_exit_code() -> None:
    done = ferry("--help")
    assert done.returncode == 0 and done.stderr == ""
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", done.stdout, re.M)
    for code in "0123":
        assert re.search(rf"^  {code}  ", done.stdout, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    done = ferry(command, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"Usage: ferry {command}")
    assert "--help" in done.stdout and "--log-level" in done.stdout
    assert "Examples:" in done.stdout or command == "info"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_man_page_has_every_flag(command: str) -> None:
    page = (SOURCE / "docs/man/ferry.1").read_text().replace("\\-", "-")
    section = re.search(
        rf'^\.(?:B|BI) "?{command}\b.*?(?=^\.TP\n\.BI? "?[a-z]|^\.PP)',
        page,
        re.M | re.S,
    )
    assert section
    common = {"--help", "--json", "--log-level", "--token", "--timeout"}
    flags = re.findall(r"^  (--[a-z-]+)", ferry(command, "--help").stdout, re.M)
    assert len(flags) >= 3
    for flag in set(flags) - common:
        assert re.search(rf"{flag}\b(?!-)", section.group()), flag
    for flag in common:
        assert flag in page


def test_version() -> None:
    done = ferry("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"ferry \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "a command is missing"),
        (["psh"], "unknown command psh (did you mean push?)"),
        (["--verson"], "unknown option --verson"),
        (["push"], "SOURCE is missing"),
        (["push", "model"], "URL is missing"),
        (["push", "m", "http://h", "--dtyp", "bf16", "--jsn"], "--jsn"),
        (["push", "m", "http://h", "--dtype"], "--dtype takes a value"),
        (["push", "m", "http://h", "--dtype", "bf17"], "bf17"),
        (["push", "m", "http://h", "--rounds", "0"], "--rounds takes 1 to"),
        (["push", "m", "http://h", "--rounds", "x"], "whole number, got 'x'"),
        (["push", "m", "http://h", "--init-info", "[1]"], "JSON object"),
        (
            ["push", "m", "http://h", "--packed", "--init-info"]
            + ['{"packed":false}'],
            "both give packed",
        ),
        (
            ["push", "m", "http://h", "--no-packed", "--init-info"]
            + ['{"packed":false}'],
            "--no-packed and --init-info both give packed",
        ),
        (
            ["push", "m", "http://h", "--packed", "--no-packed"],
            "--packed and --no-packed are both given",
        ),
        (
            ["push", "m", "http://h", "--provider", "tcp", "--init-info"]
            + ['{"provider":"ucx"}'],
            "--provider and --init-info both give provider",
        ),
        (["push", "m", "--master-port", "65536", "h"], "0 to 65535, got 65536"),
        (["push", "--to", "http://h"], "SOURCE is missing"),
        (["push", "m", "http://h", "--to", "http://h/"], "is given twice"),
        (["push", "m", *["--to", "http://h"] * 65], "--to is given more than"),
        (
            ["push", "m", "http://a", *[f"--to=http://h{i}" for i in range(64)]],
            "at most 64 URLs, got 65",
        ),
        (["push", "m", "nonsense://h"], "nonsense"),
        (["push", "m", "http://h", "--init-info", '{"rank":1}'], '"rank"'),
        (
            ["push", "m", "http://h", "--init-info", '{"backend":"nccl"}'],
            '"backend", --backend says it',
        ),
        (["push", "m", "http://h", "http://h/"], "http://h/ is given twice"),
        (["push", "m", "http://h", "--weight-version", ""], "got 0"),
        (["push", "m", "http://h", "--weight-version", "x" * 257], "got 257"),
        (["push", "m", "http://h", "--weight-version", "\udcff"], "UTF-8"),
        (["push", "m", "https://h", "--ca", "/nothing"], "--ca /nothing: No"),
        (["verify", "m", "https://h", "--ca", "/dev/null"], "no PEM"),
        (
            ["generate", "--url", "https://h", "--prompt", "x", "--ca", "/"],
            "--ca /: ",
        ),
        (["push", "--json=1", "m", "http://h"], "--json takes no value"),
        (["generate", "--prompt", "x"], "--url is missing"),
        (["generate", "--url", "http://h"], "one of --prompt and --token-ids"),
        (["generate", "--url", "http://h", "--token-ids", "1,x"], "1,x"),
        (["info", "extra"], "unexpected argument extra"),
        (["info", "--jso", "--jsonn"], "did you mean --json?"),
        (["inspect"], "PATH is missing"),
        (["inspect", "m", "--plan", "--groups"], "one of --groups and --plan"),
        (["inspect", "m", "--plan", "--tp", "2", "--rank", "2"], "0 to 1"),
        (["verify", "m"], "URL is missing"),
        (["--log-level", "loud", "info"], "got loud"),
        (["info", "--log-level", "loud"], "got loud"),
    ],
)
def test_wrong_command_lines_are_one_line_and_2(
    args: list[str], says: str
) -> None:
    done = ferry(*args)
    assert done.returncode == 2, done
    assert done.stdout == ""
    line = one_line(done.stderr)
    assert says in line
    assert line.startswith("ferry") and "--help'" in line


def test_a_missing_source_is_1(tmp_path: pathlib.Path) -> None:
    done = ferry("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "nothing" in one_line(done.stderr)


def write_safetensors(
    path: pathlib.Path, entries: dict[str, Any], data: bytes = b""
) -> None:
    """Write a safetensors file with this header."""
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_source_without_parameters_is_not_pushed(
    tmp_path: pathlib.Path,
) -> None:
    empty = tmp_path / "empty.safetensors"
    write_safetensors(empty, {})
    url = f"http://127.0.0.1:{closed_port()}"
    done = ferry("push", str(empty), url)
    assert done.returncode == 1 and done.stdout == ""
    assert "empty.safetensors has no parameters" in one_line(done.stderr)


def test_a_file_of_the_other_kind_is_named_as_such(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "empty.gguf").touch()
    done = ferry("inspect", str(tmp_path / "empty.gguf"))
    assert done.returncode == 1
    assert "empty.gguf: is not a GGUF file" in one_line(done.stderr)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"GGUF" + bytes(28))
    done = ferry("inspect", str(folder))
    assert done.returncode == 1
    assert "model.safetensors: is a GGUF file" in one_line(done.stderr)


def test_names_do_not_steer_the_terminal(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "odd.safetensors"
    name = "a\nb\x1b[31mc\x85\u00e4"
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    write_safetensors(path, {name: entry}, bytes(4))
    shown = "a\\x0ab\\x1b[31mc\\xc2\\x85\u00e4"
    lines = ferry("inspect", str(path)).stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith(shown + "  float32")
    groups = ferry("inspect", str(path), "--groups").stdout
    assert shown in one_line(groups)
    seen = json.loads(ferry("inspect", str(path), "--json").stdout)
    assert seen["params"][0]["name"] == name


def test_verify_of_a_lone_file_asks_for_the_config(
    llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lone = tmp_path / "x.safetensors"
    lone.write_bytes((llama / "model.safetensors").read_bytes())
    done = ferry("verify", str(lone), f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 1
    assert "needs config.json beside it" in one_line(done.stderr)


def test_a_server_that_is_not_there_is_3(llama: pathlib.Path) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    for args in (
        ["generate", "--url", url, "--prompt", "x"],
        ["verify", str(llama), url],
        ["push", str(llama), url],
        ["push", str(llama), url, url + "/also", "--json"],
    ):
        done = ferry(*args)
        assert done.returncode == 3, done
        assert "(ECONN)" in done.stderr.splitlines()[-1]


def test_a_server_that_just_closes_may_want_https() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(20)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ask = subprocess.Popen(
            [FERRY, "generate", "--url", url, "--prompt", "x"],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
            _, errors = ask.communicate(timeout=20)
        finally:
            ask.kill()
            ask.wait()
    assert ask.returncode == 3
    assert "is it an https server?" in one_line(errors)


# ---- output ---------------------------------------------------------------


def test_a_closed_pipe_ends_it_quietly(llama: pathlib.Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [FERRY, "inspect", str(llama)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 0
    assert done.stderr == ""


def test_output_that_is_lost_is_a_failure(llama: pathlib.Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [FERRY, "inspect", str(llama)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert done.returncode == 1
    assert "No space left" in one_line(done.stderr)


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_descriptors_are_not_reused(
    llama: pathlib.Path, closed: list[int]
) -> None:
    """No socket becomes standard error, and lost output is a failure."""
    how = " ".join(f"{fd}>&-" for fd in closed)
    got: list[bytes] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(20)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        push = subprocess.Popen(
            ["sh", "-c", f'exec "$0" push "$1" {url} {how}', FERRY]
            + [str(llama)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(20)
                got.append(peer.recv(65536))
                links = pathlib.Path(f"/proc/{push.pid}/fd")
                for fd in closed:
                    assert os.readlink(links / str(fd)) == "/dev/null"
            push.wait(20)
        finally:
            push.kill()
            push.wait()
    assert re.match(rb"(GET|POST) /", got[0])
    if 1 in closed:
        done = subprocess.run(
            ["sh", "-c", 'exec "$0" info >&-', FERRY],
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
        assert done.returncode == 1
        assert "standard output" in one_line(done.stderr)


# ---- info (F2) ------------------------------------------------------------


def test_info_lists_four_built_ins_on_both_sides() -> None:
    done = ferry("info", "--json")
    assert done.returncode == 0
    info = json.loads(one_line(done.stdout))
    for side in ("trainer", "worker"):
        assert [b["name"] for b in info[side]] == BUILT_IN
        for backend in info[side]:
            assert backend["built_in"] is True
            assert isinstance(backend["available"], bool)
            assert (backend["reason"] == "") == backend["available"]
        assert {b["name"]: b["available"] for b in info[side]}["ipc"]
    plain = ferry("info")
    assert plain.returncode == 0
    backends, providers = plain.stdout.split("providers:\n")
    for name in BUILT_IN:
        assert len(re.findall(rf"^  {name} ", backends, re.M)) == 2
    assert re.findall(r"^  (\w+) ", providers, re.M) == PROVIDERS


def test_info_lists_providers_and_probes_them_when_asked() -> None:
    for extra in ([], ["--probe"]):
        info = json.loads(ferry("info", "--json", *extra).stdout)
        assert [p["name"] for p in info["providers"]] == PROVIDERS
        for provider in info["providers"]:
            assert isinstance(provider["available"], bool)
            assert provider["available"] or provider["reason"]
        tcp = info["providers"][0]
        assert tcp == {"name": "tcp", "available": True, "reason": ""}
        # Only a probe may open what it lists.
        reasons = [p["reason"] for p in info["providers"]]
        assert not (extra and any("--probe" in reason for reason in reasons))


def test_info_says_why_a_backend_is_missing(tmp_path: pathlib.Path) -> None:
    empty = {**os.environ, "FERRY_MODULE_PATH": str(tmp_path)}
    info = json.loads(ferry("info", "--json", env=empty).stdout)
    for side in ("trainer", "worker"):
        ipc = next(b for b in info[side] if b["name"] == "ipc")
        assert ipc["available"] is False
        assert ipc["reason"]


def test_info_loads_no_transport_and_no_ggml(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "loader"
    debug = {
        **os.environ,
        "LD_DEBUG": "files",
        "LD_DEBUG_OUTPUT": str(log),
    }
    assert ferry("info", "--json", env=debug).returncode == 0
    said = "".join(p.read_text() for p in tmp_path.glob("loader.*"))
    loaded = {
        pathlib.Path(name).name
        for name in re.findall(r"file=(\S+) \[0\];\s+generating", said)
    }
    assert any(name.startswith("libferry.so") for name in loaded), said[:500]
    for name in loaded:
        assert not re.search(
            r"ucx|ucp|uct|nccl|cuda|ggml|ferry_", name
        ), f"info loads {name}"


# ---- inspect --------------------------------------------------------------


def test_inspect_shows_what_the_file_says(llama: pathlib.Path) -> None:
    entries = header(llama / "model.safetensors")
    done = ferry("inspect", str(llama), "--json")
    assert done.returncode == 0, done.stderr
    seen = json.loads(one_line(done.stdout))
    assert seen["n_params"] == len(entries)
    assert {p["name"]: p["shape"] for p in seen["params"]} == {
        name: entry["shape"] for name, entry in entries.items()
    }
    assert {p["dtype"] for p in seen["params"]} == {"bfloat16"}
    for param in seen["params"]:
        first, last = entries[param["name"]]["data_offsets"]
        assert param["bytes"] == last - first
    assert seen["bytes"] == sum(p["bytes"] for p in seen["params"])
    plain = ferry("inspect", str(llama)).stdout.splitlines()
    assert len(plain) == len(entries) + 1
    assert plain[-1].startswith(f"{len(entries)} parameters, ")


def test_inspect_can_cast(llama: pathlib.Path) -> None:
    as_is = json.loads(ferry("inspect", str(llama), "--json").stdout)
    cast = json.loads(
        ferry("inspect", str(llama), "--json", "--dtype", "f32").stdout
    )
    assert cast["bytes"] == 2 * as_is["bytes"]


def test_inspect_groups_are_a_partition_by_layer(
    llama: pathlib.Path,
) -> None:
    """B9: each layer's names are one group, in the order of the source."""
    done = ferry("inspect", str(llama), "--groups", "--json")
    assert done.returncode == 0, done.stderr
    groups = [g["names"] for g in json.loads(done.stdout)["groups"]]
    names = json.loads(ferry("inspect", str(llama), "--json").stdout)
    assert [n for g in groups for n in g] == [
        p["name"] for p in names["params"]
    ]
    for group in groups:
        keys = {
            m.group(0) if (m := re.match(r"model\.layers\.\d+\.", n)) else ""
            for n in group
        }
        assert len(keys) == 1
    plain = ferry("inspect", str(llama), "--groups").stdout.splitlines()
    assert len(plain) == len(groups)


def test_inspect_plan_of_a_rank(llama: pathlib.Path) -> None:
    """The second of two ranks takes the second half of each column cut."""
    done = ferry(
        "inspect", str(llama), "--plan", "--tp", "2", "--rank", "1", "--json"
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(one_line(done.stdout))
    assert seen["architecture"] == "LlamaForCausalLM"
    assert (seen["tp_rank"], seen["tp_size"]) == (1, 2)
    text = json.dumps(seen["plan"])
    for name in header(llama / "model.safetensors"):
        assert name in text
    assert "qkv_proj" in text and "gate_up_proj" in text
    plain = ferry("inspect", str(llama), "--plan", "--tp", "2", "--rank", "1")
    assert plain.returncode == 0
    assert "rank 1 of 2" in plain.stdout


def test_inspect_plan_refuses_a_cut_that_does_not_fit(
    llama: pathlib.Path,
) -> None:
    done = ferry("inspect", str(llama), "--plan", "--tp", "3")
    assert done.returncode == 1
    line = one_line(done.stderr)
    assert "4" in line and "3" in line and "EBACKEND" not in line
