# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240
"""Updates of a paused fleet with requests waiting at its door, and what an
answer owes to older weights: nothing where the cache was cleared, its own
past where it was kept (O-06, O-52, O-53)."""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, push  # noqa: E402
import checkpoints  # noqa: E402
import llama  # noqa: E402
import model_files  # noqa: E402

PROMPT = [1, 2, 3, 4, 5]


def make(folder: Path, seed: int) -> Path:
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed,
                     dtype="F32")
    return folder


def greedy(folder: Path, n: int) -> list[int]:
    """The reference's tokens, up to the first narrow choice."""
    tokens = []
    model = llama.Llama(model_files.open_model(str(folder)))
    for step in model.greedy(PROMPT, n):
        if step.gap < 1e-2:
            break
        tokens.append(step.token)
    assert len(tokens) > 3
    return tokens


def paused_rounds(tmp_path: Path, backend: str, rounds: int) -> None:
    """Requests come before, while and after the pause closes the gates of two
    replicas; every hop is delayed at random. Nothing locks up, and whoever
    came during the pause is answered by the new weights alone."""
    folders = [make(tmp_path / "a", 1), make(tmp_path / "b", 2)]
    want = [greedy(folder, 8) for folder in folders]
    chance = random.Random(6)

    def jitter() -> None:
        time.sleep(chance.uniform(0, 0.005))

    with Server(tmp_path / "serve", folders[0], "--kernel-format", "f32",
                "--threads", "1", "--data-parallel-size", "2",
                "--max-num-seqs", "2", "--weight-transfer-config",
                json.dumps({"backend": backend})) as server, \
            ThreadPoolExecutor(16) as pool:
        for k in range(rounds):
            side = (k + 1) % 2
            early = [pool.submit(server.generate, PROMPT, 8) for _ in range(4)]
            jitter()
            assert server.post("/pause?mode=keep").code == 200
            jitter()
            late = []
            for _ in range(8):
                late.append(pool.submit(server.generate, PROMPT, 8))
                jitter()
            # All eight stand at the door before the weights change.
            deadline = time.monotonic() + 20
            while sum(r["running"] + r["waiting"]
                      for r in server.status()["replicas"]) < 8:
                assert time.monotonic() < deadline
            push(folders[side], server.url, version=f"v{k}",
                 extra=("--backend", backend))
            assert not any(job.done() for job in late)
            jitter()
            assert server.post("/resume").code == 200
            for job in late:
                choice = job.result(timeout=30)
                assert [s["version"] for s in choice["weight_versions"]] == [f"v{k}"]
                assert choice["token_ids"][: len(want[side])] == want[side]
            for job in early:
                assert len(job.result(timeout=30)["token_ids"]) == 8


@pytest.mark.parametrize("backend,rounds", [("ipc", 40), ("nccl", 20)])
def test_o06_a_paused_fleet_updates_with_requests_at_its_door(
    tmp_path: Path, backend: str, rounds: int
) -> None:
    paused_rounds(tmp_path, backend, rounds)


def test_o52_no_answer_leans_on_what_older_weights_left(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    with Server(tmp_path / "serve", a, "--kernel-format", "f32") as server:

        def ask() -> tuple[list[int], int]:
            reply = server.post("/v1/completions", {
                "prompt": PROMPT, "max_tokens": 12, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True})
            return (reply.json["choices"][0]["token_ids"],
                    reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        first = ask()
        assert ask() == first
        push(b, server.url)
        tokens, cached = ask()
        assert cached == 0
        want = greedy(b, 12)
        assert tokens[: len(want)] == want


def agrees(model: llama.Llama, ids: list[int], answer: list[int]) -> int:
    """How many of the answer's tokens are the model's clear choice after ids
    and the tokens before; fails where a clear choice is another."""
    clear = 0
    for token in answer:
        step = llama.choose(model.forward(ids)[-1].astype(np.float64))
        if step.gap >= 1e-2:
            assert step.token == token
            clear += 1
        ids = [token]
    return clear


@pytest.mark.parametrize("clear", [False, True])
def test_o53_a_kept_request_goes_on_over_the_cache_that_was_asked_for(
    clear: bool, tmp_path: Path
) -> None:
    a, b = make(tmp_path / "a", 1), make(tmp_path / "b", 2)
    n = 480
    with Server(tmp_path / "serve", a, "--kernel-format", "f32", "--threads",
                "1", "--tensor-parallel-size", "2") as server:
        for _ in range(20):
            push(a, server.url, version="old")
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(server.generate, PROMPT, n)
                server.wait_running(2)
                flag = "true" if clear else "false"
                assert server.post(
                    f"/pause?mode=keep&clear_cache={flag}").code == 200
                held = server.status()["replicas"][0]["running"] == 1
                push(b, server.url, version="new")
                replica = server.status()["replicas"][0]
                if held and replica["running"] == 1 and not clear:
                    assert replica["oldest_cache_version"] == "old"
                assert server.post("/resume").code == 200
                choice = job.result(timeout=60)
            spans = choice["weight_versions"]
            if held and len(spans) == 2:
                break
        assert server.status()["replicas"][0]["oldest_cache_version"] is None
    assert [s["version"] for s in spans] == ["old", "new"]
    tokens, k = choice["token_ids"], spans[1]["start"]
    old = llama.Llama(model_files.open_model(str(a)))
    new = llama.Llama(model_files.open_model(str(b)))
    after = tokens[k : k + 24]
    if clear:
        # Computed again, by the new weights alone.
        assert agrees(new, PROMPT + tokens[:k], after) > 0
    else:
        # The past is the old weights', up to the last token, which no step
        # had seen when the pause came.
        old.forward(PROMPT + tokens[: k - 1])
        old.w = new.w
        assert agrees(old, tokens[k - 1 : k], after) > 0


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
