# SPDX-License-Identifier: Apache-2.0
"""Compare every stored byte of every rank with an independent prediction.

Fused q/k/v and gate/up, cuts by rows and columns, shared kv heads, padded
vocabularies, and each kernel format (H1, J2). ctest: timeout=300
"""

from __future__ import annotations

import os
import shutil

import pytest

import model_run
from model_run import checkpoint, drive

# model_run puts tests/reference on the path.
from model_files import open_model
from stored import Shard

CASES = [
    (arch, variant, kernel)
    for arch in ("llama", "qwen2", "qwen3")
    for variant in ("gqa", "tied", "mqa", "tp3", "padded")
    for kernel in ("f32", "bf16", "q8_0")
]


def sizes(arch: str, variant: str, kernel: str) -> list[int]:
    """Return the numbers of ranks to try; q8_0 cuts end on blocks of 32."""
    if variant == "tp3":
        return [1, 3]
    if kernel == "q8_0":
        return [1, 4] if variant == "mqa" else [1, 2]
    return [1, 2, 4]


def compare(path: str, tp: int, kernel: str) -> None:
    """Load on tp ranks and compare all of what they hold."""
    where = os.path.join(model_run.folder(), "dump")
    os.makedirs(where)
    try:
        drive(path, [], "--tp", tp, "--kernel", kernel, "--dump", where)
        model = open_model(path)
        for rank in range(tp):
            inner = os.path.join(where, f"tp{rank}")
            want = dict(Shard(model, tp, rank, kernel).stored())
            assert sorted(os.listdir(inner)) == sorted(want)
            for name, raw in want.items():
                with open(os.path.join(inner, name), "rb") as src:
                    assert src.read() == raw, f"rank {rank}: {name}"
    finally:
        shutil.rmtree(where)


@pytest.mark.parametrize(("arch", "variant", "kernel"), CASES)
def test_stored_bytes(arch: str, variant: str, kernel: str) -> None:
    """f32 checkpoints into every format and size."""
    path = checkpoint(arch, variant)
    for tp in sizes(arch, variant, kernel):
        compare(path, tp, kernel)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("kernel", ["f32", "bf16", "q8_0"])
def test_other_wire_dtypes(dtype: str, kernel: str) -> None:
    """Checkpoints in half precision, converted while they are loaded."""
    compare(checkpoint("llama", "gqa", dtype), 2, kernel)


def test_gguf() -> None:
    """A quantised GGUF: dequantised, put in order, quantised again."""
    compare(checkpoint("llama", "gqa", "F32", "Q4_1"), 2, "q8_0")


@pytest.mark.parametrize(
    ("variant", "tp", "kernel", "words"),
    [
        ("gqa", 3, "f32", ("num_attention_heads 4", "size 3")),
        ("wide-head", 8, "f32", ("num_attention_heads 4", "size 8")),
        ("tp3", 2, "f32", ("num_key_value_heads 3", "size 2")),
        ("gqa", 4, "q8_0", ("columns per rank 16", "32")),
    ],
)
def test_cuts_that_cannot_be_made(
    variant: str, tp: int, kernel: str, words: tuple[str, ...]
) -> None:
    """Refused with both numbers."""
    path = checkpoint("llama", variant)
    text = drive(path, [], "--tp", tp, "--kernel", kernel, fails=True)
    for word in words:
        assert word in text
