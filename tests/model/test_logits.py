# SPDX-License-Identifier: Apache-2.0
"""Compare logits and greedy tokens with the NumPy reference (H1).

Every architecture and variant, in f32 to 1e-4; the same whatever the number
of ranks, the batch and the cut of the prompt are. ctest: timeout=300
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import model_run
from model_run import checkpoint, drive, reference

# model_run puts tests/reference on the path.
import gguf_io
from llama import Llama, inverse_frequencies
from model_files import Model
from safetensors_io import Tensor

N_TOKENS = 12
GAP = 1e-2
PROMPTS = [
    [84, 104, 269, 32, 258],
    [5],
    [300, 17, 99, 256, 3, 3, 41, 200, 118, 7, 77, 270, 310],
    [64, 65, 66],
]
CASES = [
    (arch, variant)
    for arch, variants in model_run.checkpoints.VARIANTS.items()
    for variant in variants
]


def ranks_of(variant: str) -> list[int]:
    """Return the numbers of ranks to try."""
    return [3] if variant == "tp3" else [2, 4]


def expect_logits(path: str, got: list[list[float]], prompts: list) -> None:
    """Check the logits of each prompt's last token, to 1e-4."""
    llama = reference(path)
    for prompt, row in zip(prompts, got, strict=True):
        llama.reset()
        want = llama.forward(prompt)[-1]
        error = np.abs(np.array(row) - want).max()
        assert error < 1e-4, f"prompt {prompt}: off by {error}"


def expect_tokens(path: str, got: list[list[int]], prompts: list) -> None:
    """Check greedy tokens up to the first choice that is a close call."""
    for prompt, tokens in zip(prompts, got, strict=True):
        for step, token in zip(
            reference(path).greedy(prompt, N_TOKENS), tokens, strict=True
        ):
            if step.gap < GAP:
                break
            assert token == step.token


@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_one_rank_gives_the_reference(arch: str, variant: str) -> None:
    """All prompts as one batch."""
    path = checkpoint(arch, variant)
    out = drive(path, PROMPTS, "--generate", N_TOKENS)
    expect_logits(path, out["logits"], PROMPTS)
    expect_tokens(path, out["tokens"], PROMPTS)


@pytest.mark.parametrize(("arch", "variant"), CASES)
def test_ranks_do_not_change_it(arch: str, variant: str) -> None:
    """Fewer kv heads than ranks, and padded vocabularies, included."""
    path = checkpoint(arch, variant)
    for tp in ranks_of(variant):
        out = drive(path, PROMPTS, "--generate", N_TOKENS, "--tp", tp)
        expect_logits(path, out["logits"], PROMPTS)
        expect_tokens(path, out["tokens"], PROMPTS)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_batch_does_not_change_it(arch: str) -> None:
    """Each prompt alone gives what all of them together give."""
    path = checkpoint(arch, "gqa")
    together = drive(path, PROMPTS, "--generate", N_TOKENS)
    for i, prompt in enumerate(PROMPTS):
        alone = drive(path, [prompt], "--generate", N_TOKENS)
        assert alone["tokens"][0] == together["tokens"][i]
        assert np.allclose(
            alone["logits"][0], together["logits"][i], atol=1e-5
        )


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunked_prefill_equals_whole(chunk: int) -> None:
    """A prompt fed in pieces reads its earlier pieces from the cache."""
    path = checkpoint("llama", "rope-llama3")
    out = drive(path, PROMPTS, "--generate", N_TOKENS, "--chunk", chunk)
    expect_logits(path, out["logits"], PROMPTS)
    expect_tokens(path, out["tokens"], PROMPTS)


def test_threads_do_not_change_it() -> None:
    """Two threads, on one rank and on two."""
    path = checkpoint("qwen3", "gqa")
    for tp in (1, 2):
        out = drive(path, PROMPTS, "--threads", 2, "--tp", tp)
        expect_logits(path, out["logits"], PROMPTS)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_same(arch: str) -> None:
    """Config, names and the q/k row order come back from a GGUF."""
    path = checkpoint(arch, "tied", gguf="F32")
    out = drive(path, PROMPTS, "--generate", N_TOKENS, "--tp", 2)
    expect_logits(path, out["logits"], PROMPTS)
    expect_tokens(path, out["tokens"], PROMPTS)


def test_gguf_rope_factors_are_read_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama3 scaling, of which a GGUF keeps only the resulting factors."""
    config = model_run.checkpoints.make_config("llama", "gqa")
    config.update(head_dim=64, rope_theta=500000.0)
    scaled = {
        **config,
        "rope_scaling": {
            **model_run.checkpoints.LLAMA3_ROPE,
            "original_max_position_embeddings": 8192,
        },
    }
    tensors = {
        name: Tensor("F32", values)
        for name, values in model_run.checkpoints.make_weights(
            config, 7
        ).items()
    }
    llama = Llama(Model(scaled, tensors, None))
    plain = inverse_frequencies(config)
    factors = (plain / llama.frequencies).astype(np.float32)
    assert factors.min() == 1 and abs(factors.max() - 8) < 1e-6
    write = gguf_io.write_file

    def with_factors(path: str, metadata: Any, out: Any) -> None:
        write(path, metadata, {**out, "rope_freqs.weight": ("F32", factors)})

    monkeypatch.setattr(gguf_io, "write_file", with_factors)
    path = os.path.join(model_run.folder(), "factors.gguf")
    tokenizer = model_run.checkpoints.make_tokenizer()
    gguf_io.from_hf(path, config, tensors, tokenizer, "F32")
    prompt = list(range(40))
    got = drive(path, [prompt])["logits"][0]
    assert np.abs(np.array(got) - llama.forward(prompt)[-1]).max() < 1e-4
    factors = factors * 1.1
    gguf_io.from_hf(path, config, tensors, tokenizer, "F32")
    assert "not llama3 scaling" in drive(path, [prompt], fails=True)


@pytest.mark.parametrize(("kernel", "bound"), [("bf16", 0.05), ("q8_0", 0.08)])
def test_narrow_kernels_stay_near(kernel: str, bound: float) -> None:
    """bf16 and q8_0 follow f32 within their own precision."""
    path = checkpoint("llama", "tp3")
    for tp in (1, 3):
        out = drive(path, PROMPTS, "--kernel", kernel, "--tp", tp)
        for prompt, row in zip(PROMPTS, out["logits"], strict=True):
            reference(path).reset()
            want = reference(path).forward(prompt)[-1]
            error = np.abs(np.array(row) - want).max() / np.abs(want).max()
            assert error < bound, f"{kernel}: off by {error}"


def test_random_weights_do_not_depend_on_ranks() -> None:
    """A value is a function of seed, name and index alone."""
    path = checkpoint("llama", "padded")
    outs = [
        drive(path, PROMPTS, "--dummy", seed, "--tp", tp)["logits"]
        for seed, tp in ((1, 1), (1, 2), (2, 1))
    ]
    assert np.allclose(outs[0], outs[1], atol=1e-5)
    assert not np.allclose(outs[0], outs[2], atol=1e-2)


def test_bad_steps_are_refused_by_every_rank() -> None:
    """A token or position out of range, before any collective."""
    path = checkpoint("llama", "gqa")
    for tp in (1, 2):
        text = drive(path, [[1, 9999]], "--tp", tp, fails=True)
        assert "token 9999" in text and "has 320" in text
        text = drive(path, [[1] * 513], "--tp", tp, fails=True)
        assert "513 tokens at position 0, the limit is 512" in text
