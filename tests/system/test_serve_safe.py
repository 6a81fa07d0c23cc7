# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=180
"""What keeps a server safe (J3): TLS with a CA of the test's own, a token of
its own for the weight routes, and bounds that slow clients meet."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import FERRY, Server, ferry, http, push  # noqa: E402
import checkpoints  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=1,
                     dtype="BF16")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=2,
                     dtype="BF16")
    return folder


def openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, timeout=30,
                   capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a certificate of it for 127.0.0.1, and a CA that signed nothing."""
    folder = tmp_path_factory.mktemp("pki")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt",
                "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-subj", f"/CN=ferry test {name}", cwd=folder)
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-keyout", "server.key", "-out", "server.csr",
            "-subj", "/CN=localhost", cwd=folder)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey",
            "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san",
            "-out", "server.pem", cwd=folder)
    return folder


# ---- TLS ----


def test_j3_tls_for_server_and_clients(
    tmp_path: Path, model: Path, other: Path, pki: Path
) -> None:
    with Server(tmp_path, model, "--kernel-format", "bf16",
                "--tls-cert", str(pki / "server.pem"),
                "--tls-key", str(pki / "server.key")) as server:
        url = f"https://127.0.0.1:{server.port}"
        assert url in server.log()
        ca = ("--ca", str(pki / "ca.pem"))
        push(other, url, version="v1", extra=ca)
        done = ferry("verify", str(other), url, *ca)
        assert done.returncode == 0
        done = ferry("generate", "--url", url, "--token-ids", "1,2,3",
                     "--max-tokens", "3", "--json", *ca)
        assert len(json.loads(done.stdout)["choices"][0]["token_ids"]) == 3
        # A CA that did not sign it, and the system's, are refused by name.
        for extra in [("--ca", str(pki / "stranger.pem")), ()]:
            done = push(model, url, extra=extra, check=False)
            assert done.returncode in (1, 3)
            assert "certificate" in done.stderr, done.stderr
        # Plain HTTP is no way in.
        done = push(model, f"http://127.0.0.1:{server.port}", check=False)
        assert done.returncode in (1, 3)
        context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=context))
        with opener.open(url + "/weight_info", timeout=20) as answer:
            assert json.load(answer) == {"weight_version": "v1"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tls-cert", "{pki}/server.pem"], "--tls-cert needs --tls-key"),
        (["--tls-cert", "{pki}/none.pem", "--tls-key", "{pki}/server.key"],
         "none.pem"),
        (["--tls-cert", "{pki}/san", "--tls-key", "{pki}/server.key"],
         "no PEM file"),
        (["--tls-cert", "{pki}/server.pem", "--tls-key", "{pki}/ca.key"],
         "--tls-key"),
        (["--weight-api-key", ""], "--weight-api-key"),
        (["--join-api-key", "x"], "needs --join"),
    ],
)
def test_flags_that_cannot_be_are_refused_by_name(
    tmp_path: Path, model: Path, pki: Path, flags: list[str], words: str
) -> None:
    done = subprocess.run(
        [FERRY, "serve", str(model), "--port", "0",
         "--port-file", str(tmp_path / "port"),
         *[flag.format(pki=pki) for flag in flags]],
        capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2), done.stderr
    assert words in done.stderr, done.stderr


def test_a_busy_port_is_named_and_said_to_be_in_use(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [FERRY, "serve", str(model), "--port", str(port)],
            capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"cannot listen on 127.0.0.1 port {port}" in last
    assert "in use" in last


def test_a_name_that_nobody_knows_is_named(model: Path) -> None:
    done = subprocess.run(
        [FERRY, "serve", str(model), "--host", "nowhere.invalid"],
        capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "host: nowhere.invalid:8000: " in done.stderr.splitlines()[-1]


# ---- tokens ----


def test_j3_a_token_of_their_own_for_the_weight_routes(
    tmp_path: Path, model: Path, other: Path
) -> None:
    with Server(tmp_path, model, "--kernel-format", "bf16", "--api-key", "ask",
                "--weight-api-key", "replace") as server:
        body = {"prompt": PROMPT, "max_tokens": 1}
        codes = {
            token: (
                server.post("/v1/completions", body, token=token).code,
                server.get("/ferry/status", token=token).code,
                server.get("/weight_info", token=token).code,
                server.post("/pause", token=token).code,
                server.get("/health", token=token).code,
                server.post("/resume", token=token).code,
            )
            for token in (None, "ask", "replace", "replac", "replacee")
        }
        none = (401, 401, 401, 401, 200, 401)
        assert codes == {
            None: none,
            "ask": (200, 200, 401, 401, 200, 401),
            "replace": (200, 200, 200, 200, 200, 200),
            "replac": none,
            "replacee": none,
        }
        done = push(other, server.url, extra=("--token", "ask"), check=False)
        assert done.returncode == 1 and "EAUTH" in done.stderr
        assert "ask" not in done.stderr.split()
        push(other, server.url, extra=("--token", "replace"))


def test_a_weight_token_alone_leaves_generation_open(
    tmp_path: Path, model: Path
) -> None:
    with Server(tmp_path, model, "--weight-api-key", "replace") as server:
        server.generate(PROMPT, 1)
        assert server.post("/start_weight_update").code == 401
        assert server.get("/weight_info", token="replace").code == 200


# ---- slow clients ----


def drip(port: int, first: bytes, piece: bytes, seconds: float) -> float:
    """Sends a piece every 0.2 s; how long the server put up with it."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
        s.sendall(first)
        s.settimeout(0.2)
        while time.monotonic() - started < seconds:
            try:
                s.sendall(piece)
                if s.recv(4096) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b""),  # says nothing
        (b"GET /health HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n"),  # headers
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
         b"Content-Length: 100000\r\n\r\n", b" "),  # body
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
         b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        # between requests of one connection
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    ],
    ids=["silent", "headers", "body", "chunks", "keep-alive"],
)
def test_j3_a_slow_client_is_cut_off_in_bounded_time(
    tmp_path: Path, model: Path, first: bytes, piece: bytes
) -> None:
    with Server(tmp_path, model, "--request-timeout", "1") as server:
        took = drip(server.port, first, piece, 10)
        assert 0.8 < took < 4, took
        server.generate(PROMPT, 1)


def test_j3_slow_clients_cannot_take_all_connections(
    tmp_path: Path, model: Path
) -> None:
    """One address gets so many; when they are cut the next ones get in."""
    with Server(tmp_path, model, "--request-timeout", "2",
                "--max-connections-per-address", "8") as server:
        held = [socket.create_connection(("127.0.0.1", server.port), 5)
                for _ in range(8)]
        for s in held:
            s.sendall(b"GET /health HTTP/1.1\r\n")
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", server.port), 5) as late:
            late.settimeout(1.5)
            try:
                late.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert late.recv(100) == b""
            except ConnectionError:
                pass
        deadline = time.monotonic() + 8
        while True:
            try:
                if http(server.url + "/health", timeout=1).code == 200:
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for s in held:
            s.close()


def test_a_handler_may_take_longer_than_a_request(
    tmp_path: Path, model: Path
) -> None:
    """The bound is on the client's sending, not on the server's work."""
    with Server(tmp_path, model, "--request-timeout", "1",
                "--max-model-len", "512") as server:
        result: dict = {}
        assert server.post("/pause?mode=keep").code == 200
        thread = threading.Thread(
            target=lambda: result.update(server.generate(PROMPT, 3)))
        thread.start()
        time.sleep(2.5)
        assert server.post("/resume").code == 200
        thread.join(30)
        assert result["finish_reason"] == "length"


def test_a_large_body_at_a_fair_pace_is_taken(
    tmp_path: Path, model: Path
) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    body += b" " * (1 << 20)
    with Server(tmp_path, model, "--request-timeout", "1") as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                      b"Connection: close\r\nContent-Length: %d\r\n\r\n"
                      % len(body))
            step = len(body) // 10
            for at in range(0, len(body), step):
                s.sendall(body[at : at + step])
                time.sleep(0.2)
            assert s.recv(20).startswith(b"HTTP/1.1 200")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
