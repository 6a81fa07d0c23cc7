# SPDX-License-Identifier: Apache-2.0
"""Compare token ids with the reference tokeniser, and SmolLM2's answers.

Random text of many scripts through each pre-tokeniser; the real model's
prompts, greedy tokens and logits when its file is at hand.
ctest: timeout=300
"""

from __future__ import annotations

import json
import os
import random
import subprocess

import pytest

import model_run
from model_run import DRIVER, HERE, checkpoint, drive

# model_run puts tests/reference on the path.
import bpe
import gguf_io

SMOLLM2 = os.path.join(
    HERE, "..", "..", "build", "models", "SmolLM2-135M-Instruct.Q4_1.gguf"
)
needs_smollm2 = pytest.mark.skipif(
    not os.path.exists(SMOLLM2),
    reason="build/models has no SmolLM2 (scripts/lib/setup.sh model)",
)

# Pieces that the patterns treat differently; all long in Unicode.
PARTS = [
    "hello", "World", "don't", "I'LL", "we've", "'s", "'", "x'S", "12345",
    "7", "½", "٣٤", "x2y", " ", "  ", "     ", "\n", "\r\n", "\n\n\n", "\t",
    "\u00a0", "\u3000", "\u2028", "\u0085", "!", "...", "?!\n", "-->", "_",
    "é", "e\u0301", "ß", "Ünï", "Ж", "яблоко", "中文字", "日本", "한국어",
    "हिन्दी", "العربية", "😀", "👍🏽", "👨‍👩‍👧", "€", "£3.50", "\u200b",
    "<|im_start|>", "<|im_end|>", "<|im_", "<|endoftext|>", "the weights",
    " of the", "answer", "def f(x):\n    return x", "http://a.b/c?d=1&e",
]  # fmt: skip

SPLIT = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False}


def texts(seed: int, n: int) -> list[str]:
    """Return random texts of the parts above."""
    chance = random.Random(seed)
    return [
        "".join(chance.choices(PARTS, k=chance.randint(1, 25)))
        for _ in range(n)
    ]


def encode(path: str, lines: list[str]) -> list[list[int]]:
    """Return the ids of each text."""
    done = subprocess.run(
        [DRIVER, path, "--encode", *lines],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def pre_tokenizer(kind: str) -> dict:
    """Return what checkpoints of each kind have in tokenizer.json."""
    if kind == "gpt2":
        return {**BYTE_LEVEL, "use_regex": True}
    if kind == "smollm":
        first = {"type": "Digits", "individual_digits": True}
        last = {**BYTE_LEVEL, "use_regex": True}
    else:
        first = {
            "type": "Split",
            "pattern": {"Regex": SPLIT[kind]},
            "behavior": "Isolated",
            "invert": False,
        }
        last = {**BYTE_LEVEL, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [first, last]}


def compare(ours: list[list[int]], reference: bpe.Bpe, lines: list) -> None:
    """Check ids, and that they spell the text again."""
    for line, ids in zip(lines, ours, strict=True):
        assert ids == reference.encode(line), repr(line)
        assert reference.decode(ids) == line


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "llama3", "qwen2"])
@pytest.mark.parametrize("form", ["json", "lines", "gguf"])
def test_ids_equal_the_reference(kind: str, form: str) -> None:
    """Merges as pairs and as lines, and the names that GGUF has."""
    path = os.path.join(model_run.folder(), f"tokens-{kind}-{form}")
    os.makedirs(path)
    spec = model_run.checkpoints.make_tokenizer()
    spec["pre_tokenizer"] = pre_tokenizer(kind)
    if form == "lines":
        spec["model"]["merges"] = [
            " ".join(pair) for pair in spec["model"]["merges"]
        ]
    where = os.path.join(path, "tokenizer.json")
    with open(where, "w", encoding="utf-8") as out:
        json.dump(spec, out)
    reference = bpe.from_tokenizer_json(where)
    lines = texts(3, 150)
    if form == "gguf":
        where = os.path.join(path, "vocabulary.gguf")
        write_gguf(where, spec, kind)
        reference.special = [
            token["content"] for token in spec["added_tokens"]
        ]
    compare(encode(where if form == "gguf" else path, lines), reference, lines)


def write_gguf(where: str, spec: dict, kind: str) -> None:
    """Write a vocabulary and nothing else."""
    names = {"gpt2": "gpt-2", "llama3": "llama-bpe"}
    ids = dict(spec["model"]["vocab"])
    n_plain = len(ids)
    for token in spec["added_tokens"]:
        ids[token["content"]] = token["id"]
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [1] * n_plain + [3] * (len(tokens) - n_plain)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names.get(kind, kind),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [
            " ".join(pair) if not isinstance(pair, str) else pair
            for pair in spec["model"]["merges"]
        ],
    }
    gguf_io.write_file(where, metadata, {})
    patch_types(where, metadata, types)


def patch_types(where: str, metadata: dict, types: list[int]) -> None:
    """Add token_type as i32, which the plain writer has no word for."""
    unsigned = {**metadata, "tokenizer.ggml.token_type": types}
    gguf_io.write_file(where, unsigned, {})
    with open(where, "rb") as src:
        raw = src.read()
    key = b"tokenizer.ggml.token_type"
    at = raw.index(key) + len(key) + 4
    assert raw[at : at + 4] == b"\x04\x00\x00\x00"
    with open(where, "wb") as out:
        out.write(raw[:at] + b"\x05\x00\x00\x00" + raw[at + 4 :])


@needs_smollm2
def test_smollm2_ids_equal_the_reference() -> None:
    """The real vocabulary, whose 48,900 merges meet in long words."""
    reference = bpe.from_gguf(gguf_io.read_file(SMOLLM2).metadata)
    lines = texts(11, 150)
    lines.append("antidisestablishmentarianism " * 20)
    lines.append("a" * 1500)
    compare(encode(SMOLLM2, lines), reference, lines)


@needs_smollm2
@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_says_what_it_should(tp: int) -> None:
    """Prompt ids, greedy tokens and top logits of three questions."""
    with open(os.path.join(HERE, "..", "reference",
                           "smollm2_expected.json")) as src:  # fmt: skip
        rows = json.load(src)["prompts"]
    prompts = [row["prompt_ids"] for row in rows]
    assert encode(SMOLLM2, [row["prompt"] for row in rows]) == prompts
    n_tokens = len(rows[0]["greedy_ids"])
    out = drive(SMOLLM2, prompts, "--generate", n_tokens, "--tp", tp)
    for row, logits, tokens in zip(
        rows, out["logits"], out["tokens"], strict=True
    ):
        for token, logit in zip(
            row["top_ids"], row["top_logits"], strict=True
        ):
            assert abs(logits[token] - logit) < 1e-3
        for want, token, gap in zip(
            row["greedy_ids"], tokens, row["gaps"], strict=True
        ):
            if gap < 1e-2:
                break
            assert token == want


def test_unknown_bytes_and_missing_files_are_named() -> None:
    """A checkpoint without a vocabulary, and text that cannot be spelled."""
    path = checkpoint("llama", "gqa")
    assert encode(path, [""]) == [[]]
    bare = os.path.join(model_run.folder(), "bare")
    os.makedirs(bare)
    done = subprocess.run(
        [DRIVER, bare, "--encode", "x"], capture_output=True, check=False
    )
    assert b"EUNKNOWN" in done.stderr and b"tokenizer.json" in done.stderr
