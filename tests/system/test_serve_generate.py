# SPDX-License-Identifier: Apache-2.0
# ctest: timeout=240
"""What a client of the generation routes sees: batches, seeds, stops, text,
logprobs, and which weights made each token, also while an update runs (H1;
O-55, O-57, O-65). Expected tokens come from the independent reference."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
from ferry_server import Server, http, push  # noqa: E402
import bpe  # noqa: E402
import checkpoints  # noqa: E402
import llama  # noqa: E402
import model_files  # noqa: E402

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45, 46], [99], [7, 300, 12, 200]]
N = 24


def make(folder: Path, seed: int) -> Path:
    checkpoints.make(str(folder), arch="llama", variant="gqa", seed=seed,
                     dtype="F32")
    return folder


class Reference:
    """Greedy tokens of a checkpoint, up to the first narrow choice."""

    def __init__(self, folder: Path) -> None:
        self.model = llama.Llama(model_files.open_model(str(folder)))
        self.known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], n: int) -> list[int]:
        key = (*prompt, -n)
        if key not in self.known:
            tokens = []
            for step in self.model.greedy(prompt, n):
                if step.gap < 1e-2:
                    break
                tokens.append(step.token)
            self.known[key] = tokens
        return self.known[key]

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Log-probabilities after each position of ids."""
        self.model.reset()
        logits = self.model.forward(ids).astype(np.float64)
        top = logits.max(axis=-1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
        return logits - top - total


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make(folder / "a", 1), make(folder / "b", 2)]


@pytest.fixture(scope="module")
def references(models: list[Path]) -> list[Reference]:
    return [Reference(folder) for folder in models]


@pytest.fixture(scope="module")
def server(models: list[Path],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("serve"), models[0], "--kernel-format", "f32",
        "--tensor-parallel-size", "2", "--max-num-seqs", "3", "--threads", "1",
    ) as running:
        yield running


def ask(server: Server, prompt: Any, **params: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", {
        "prompt": prompt, "max_tokens": N, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **params})
    assert reply.code == 200, reply
    return reply.json


def ids_of(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


# ---- batches, seeds ----


def test_requests_of_a_batch_do_not_see_each_other(
    server: Server, references: list[Reference]
) -> None:
    """More at once than there is room for: each answer is its own."""
    prompts = PROMPTS * 4
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: ask(server, p), prompts))
    for prompt, answer in zip(prompts, answers):
        want = references[0].tokens(prompt, N)
        assert len(want) > 3
        assert ids_of(answer)[: len(want)] == want
        assert answer["usage"] == {
            "prompt_tokens": len(prompt), "completion_tokens": N,
            "total_tokens": len(prompt) + N,
            "prompt_tokens_details": {"cached_tokens": 0}}
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_seed_fixes_the_tokens_alone_and_in_company(server: Server) -> None:
    hot = {"temperature": 1.5, "top_p": 0.95, "top_k": 50}
    alone = ids_of(ask(server, PROMPTS[0], seed=7, **hot))
    assert alone != ids_of(ask(server, PROMPTS[0], seed=8, **hot))
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(ask, server, PROMPTS[i % 3], seed=7 + i, **hot)
                for i in range(6)]
    assert ids_of(jobs[0].result()) == alone
    # Without a seed, two answers are not the same one.
    assert ids_of(ask(server, PROMPTS[0], **hot)) != ids_of(
        ask(server, PROMPTS[0], **hot))


def test_top_k_1_is_greedy(server: Server) -> None:
    greedy = ids_of(ask(server, PROMPTS[1]))
    assert ids_of(ask(server, PROMPTS[1], temperature=2, top_k=1)) == greedy


# ---- stops ----


def test_stop_tokens_end_an_answer_and_are_named(server: Server) -> None:
    whole = ids_of(ask(server, PROMPTS[0]))
    stop = whole[5]
    end = whole.index(stop) + 1
    choice = ask(server, PROMPTS[0], stop_token_ids=[stop])["choices"][0]
    assert choice["token_ids"] == whole[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    reply = server.post("/inference/v1/generate", {
        "token_ids": PROMPTS[0],
        "sampling_params": {"max_tokens": N, "temperature": 0,
                            "ignore_eos": True, "stop_token_ids": [stop]}})
    choice = reply.json["choices"][0]
    assert choice["token_ids"] == whole[:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_the_models_own_end_token_ends_an_answer(
    models: list[Path], tmp_path: Path
) -> None:
    """A checkpoint whose end token is one that it really says."""
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(models[0], folder)
    want = Reference(models[0]).tokens(PROMPTS[0], N)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = want[4]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").unlink()
    end = want.index(want[4]) + 1
    with Server(tmp_path / "serve", folder, "--kernel-format", "f32") as server:
        choice = ask(server, PROMPTS[0], ignore_eos=False)["choices"][0]
        assert choice["token_ids"] == want[:end]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert len(ids_of(ask(server, PROMPTS[0]))) == N


def test_stop_text_is_cut_off(server: Server) -> None:
    text = ask(server, "the weights")["choices"][0]["text"]
    middle = next(i for i in range(len(text) // 3, len(text))
                  if text[i].isascii() and text[i].isprintable())
    stop = text[middle]
    choice = ask(server, "the weights", stop=[stop])["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


# ---- text, logprobs ----


def test_text_goes_in_and_comes_out_as_the_reference_has_it(
    server: Server, models: list[Path], references: list[Reference]
) -> None:
    tokenizer = bpe.from_tokenizer_json(str(models[0] / "tokenizer.json"))
    text = "the weights are sent to the workers"
    answer = ask(server, text)["choices"][0]
    prompt = answer["prompt_token_ids"]
    encoded = tokenizer.encode(text)
    # The token that the checkpoint puts before every text may stand first.
    assert prompt in (encoded, [prompt[0], *encoded])
    want = references[0].tokens(prompt, N)
    assert answer["token_ids"][: len(want)] == want
    special = {checkpoints.N_VOCAB - 1 - i for i in range(4)}
    plain = [t for t in answer["token_ids"] if t not in special]
    assert answer["text"] == tokenizer.decode(plain)


def test_logprobs_are_the_references(
    server: Server, references: list[Reference]
) -> None:
    prompt = PROMPTS[1]
    answer = ask(server, prompt, max_tokens=6, logprobs=3)["choices"][0]
    table = references[0].logprobs(prompt + answer["token_ids"])
    got = answer["logprobs"]
    assert len(got["token_logprobs"]) == len(got["tokens"]) == 6
    for i, token in enumerate(answer["token_ids"]):
        row = table[len(prompt) - 1 + i]
        assert got["token_logprobs"][i] == pytest.approx(row[token], abs=1e-4)
        assert len(got["top_logprobs"][i]) in (3, 4)
        assert max(got["top_logprobs"][i].values()) == pytest.approx(
            row.max(), abs=1e-4)
    reply = server.post("/inference/v1/generate", {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 6, "temperature": 0, "logprobs": 2,
                            "ignore_eos": True}})
    for i, entry in enumerate(reply.json["choices"][0]["logprobs"]["content"]):
        row = table[len(prompt) - 1 + i]
        best = np.argsort(-row)[:2]
        assert [t["token_id"] for t in entry["top_logprobs"]] == list(best)
        assert entry["logprob"] == pytest.approx(row.max(), abs=1e-4)


# ---- the caller's mistakes ----


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [1, 100000]}, "token 1"),
        ({"prompt": [-1]}, "token 0"),
        ({"prompt": [1] * 512}, "512"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "temperature": "hot"}, "temperature"),
        ({"prompt": [1], "top_p": 0}, "top_p"),
        ({"prompt": [1], "top_k": 1.5}, "top_k"),
        ({"prompt": [1], "logprobs": 33}, "logprobs"),
        ({"prompt": [1], "n": 2}, "n = 1"),
        ({"prompt": [1], "stop": [""]}, "stop"),
        ({"prompt": [1], "stop": 5}, "stop"),
        ({"prompt": [1], "stop": ["x"] * 17}, "16"),
        ({"prompt": [1], "stop_token_ids": 5}, "stop_token_ids"),
        ({"prompt": [1], "stop_token_ids": [100000]}, "stop_token_ids"),
    ],
)
def test_mistakes_are_400_and_named(server: Server, change: dict, word: str) -> None:
    reply = server.post("/v1/completions", change)
    assert reply.code == 400, reply
    assert word in reply.json["error"]["message"], reply


def test_what_is_not_served_is_501_or_404_and_never_200(server: Server) -> None:
    """O-64: what the worker cannot do, it says."""
    reply = server.post("/v1/completions", {"prompt": [1], "stream": True})
    assert reply.code == 501 and "stream" in reply.json["error"]["message"]
    for path in ["/sleep", "/wake_up", "/reset_prefix_cache",
                 "/v1/chat/completions"]:
        assert server.post(path, {}).code in (404, 501), path


# ---- which weights made each token ----


def abort_soon(server: Server, result: dict, request_id: str) -> None:
    deadline = time.monotonic() + 20
    while not result and time.monotonic() < deadline:
        assert server.post("/abort_requests",
                           {"request_ids": [request_id]}).code == 200
        time.sleep(0.01)


def test_o65_an_aborted_answer_has_spans_for_what_it_has(server: Server) -> None:
    result: dict = {}

    def run() -> None:
        result.update(server.post("/inference/v1/generate", {
            "request_id": "mine", "token_ids": PROMPTS[0],
            "sampling_params": {"max_tokens": 400, "temperature": 0,
                                "ignore_eos": True}}).json)

    # Before its first token: nothing, and no span.
    assert server.post("/pause?mode=keep").code == 200
    thread = threading.Thread(target=run)
    thread.start()
    abort_soon(server, result, "mine")
    thread.join(30)
    choice = result["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    assert choice["weight_versions"] in (None, [])
    assert server.post("/resume").code == 200

    # In the middle: one span over what came.
    for _ in range(10):
        result.clear()
        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.03)
        abort_soon(server, result, "mine")
        thread.join(30)
        choice = result["choices"][0]
        n = len(choice["token_ids"])
        if choice["finish_reason"] == "abort" and n > 0:
            break
    assert choice["finish_reason"] == "abort" and 0 < n < 400
    assert [(s["start"], s["end"]) for s in choice["weight_versions"]] == [(0, n)]


def paused_pushes(server: Server, pushes: list[tuple[Path, str]],
                  n: int) -> list[dict] | None:
    """A request of n tokens that is held while weights are pushed; None when
    it was over too early."""
    result: dict = {}
    thread = threading.Thread(
        target=lambda: result.update(server.generate(PROMPTS[0], n)))
    thread.start()
    held = server.wait_running(2)
    for folder, version in pushes:
        # Some tokens of these weights, but never all of them.
        time.sleep(0.004)
        assert server.post("/pause?mode=keep").code == 200
        held = held and server.status()["replicas"][0]["running"] == 1
        push(folder, server.url, version=version)
        assert server.post("/resume").code == 200
    thread.join(60)
    assert len(result["token_ids"]) == n
    return result["weight_versions"] if held else None


def test_o65_two_updates_make_three_spans_and_equal_labels_one(
    models: list[Path], tmp_path: Path
) -> None:
    n = 480
    with Server(tmp_path, models[0], "--kernel-format", "f32", "--threads", "1",
                "--tensor-parallel-size", "2") as server:
        for versions in (["v1", "v2", "v3"], ["w1", "w1", "w1"]):
            for _ in range(20):
                push(models[0], server.url, version=versions[0])
                spans = paused_pushes(
                    server, [(models[1], versions[1]), (models[0], versions[2])],
                    n)
                if spans is not None and len(spans) == len(set(versions)):
                    break
            assert spans is not None, "no request was still running"
            assert [s["version"] for s in spans] == sorted(set(versions))
            assert spans[0]["start"] == 0 and spans[-1]["end"] == n
            assert all(s["start"] < s["end"] for s in spans)
            assert all(a["end"] == b["start"] for a, b in zip(spans, spans[1:]))


def test_o57_a_request_of_the_pause_is_labelled_by_what_made_it(
    models: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    with Server(tmp_path, models[0], "--kernel-format", "f32") as server:
        push(models[0], server.url, version="v1")
        assert server.post("/pause?mode=keep").code == 200
        late: dict = {}
        thread = threading.Thread(
            target=lambda: late.update(server.generate(PROMPTS[0], N)))
        thread.start()
        time.sleep(0.2)
        push(models[1], server.url, version="v2")
        assert server.post("/resume").code == 200
        thread.join(30)
        assert late["weight_versions"] == [{"version": "v2", "start": 0, "end": N}]
        want = references[1].tokens(PROMPTS[0], N)
        assert late["token_ids"][: len(want)] == want


@pytest.mark.parametrize("commit", ["inplace", "staged"])
def test_o55_arrivals_during_an_update_are_of_one_version_or_say_so(
    commit: str, models: list[Path], references: list[Reference],
    tmp_path: Path,
) -> None:
    by_version = {"v0": 0, "v1": 1, "v2": 0, "v3": 1, "v4": 0}
    answers: list[dict] = []
    refused: list[int] = []
    stop = threading.Event()

    with Server(tmp_path, models[0], "--kernel-format", "f32", "--threads", "1",
                "--tensor-parallel-size", "2", "--data-parallel-size", "2",
                "--max-num-seqs", "4", "--commit", commit) as server:
        push(models[0], server.url, version="v0")

        def arrive(i: int) -> None:
            prompt = PROMPTS[i % len(PROMPTS)]
            while not stop.is_set():
                reply = http(server.url + "/inference/v1/generate", {
                    "token_ids": prompt,
                    "sampling_params": {"max_tokens": N, "temperature": 0,
                                        "ignore_eos": True}})
                if reply.code != 200:
                    refused.append(reply.code)
                    continue
                answers.append({"prompt": prompt, **reply.json["choices"][0]})

        threads = [threading.Thread(target=arrive, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for version in ["v1", "v2", "v3", "v4"]:
            time.sleep(0.3)
            push(models[by_version[version]], server.url, version=version)
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    # The gate makes arrivals wait; it does not turn them away.
    assert not refused
    assert {s["version"] for a in answers for s in a["weight_versions"]} == set(
        by_version)
    for answer in answers:
        spans = answer["weight_versions"]
        assert spans[0]["start"] == 0 and spans[-1]["end"] == N
        assert all(a["end"] == b["start"] for a, b in zip(spans, spans[1:]))
        # Up to the first change, the tokens are that version's own.
        first = references[by_version[spans[0]["version"]]]
        want = first.tokens(answer["prompt"], N)[: spans[0]["end"]]
        assert answer["token_ids"][: len(want)] == want, answer


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
