# SPDX-License-Identifier: Apache-2.0
"""Check the references against values worked out by hand or elsewhere.

Run as `pytest check_reference.py`; a few seconds, no model file needed.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import blocks
import bpe
import checkpoints
import gguf_io
import llama
import safetensors_io as st
import stored
from model_files import open_model

IDS = [256, 300, 65, 12, 317, 99, 7]

# The first four logits of the last of IDS, seed 7, as Hugging Face
# transformers 5.24.0 computes them in float64 (its rotary tables and norms
# are float32, hence the tolerance).
LOGITS = {
    ("llama", "gqa"): [0.333, -4.8321, -2.1311, 1.2966],
    ("llama", "tied"): [5.1978, 0.7687, 5.1513, 1.3236],
    ("llama", "mqa"): [-3.6249, 2.7925, -3.1092, 0.3006],
    ("llama", "tp3"): [2.0942, 0.0158, 1.3973, -4.1708],
    ("llama", "rope-llama3"): [-2.9005, 1.9025, 0.1411, 1.0673],
    ("llama", "rope-parameters"): [-2.9005, 1.9025, 0.1411, 1.0673],
    ("qwen2", "gqa"): [-0.0898, -3.3534, -1.7577, 0.8236],
    ("qwen2", "tied"): [4.6898, -0.3008, 5.6406, 2.2366],
    ("qwen2", "mqa"): [-4.3151, 1.8476, -3.3008, 1.276],
    ("qwen3", "gqa"): [-3.4535, 0.081, -1.5582, 1.7796],
    ("qwen3", "tied"): [-3.0236, -0.5825, -1.2913, 1.648],
    ("qwen3", "padded"): [-0.257, -3.456, -2.086, 3.473],
}
LLAMA_GQA_SHA256 = (
    "9d5b250df9a1ba1a66b77b681d9eae8518d1fad9053432f036981e264c687a39"
)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),  # 1.0
        (0x3F808000, 0x3F80),  # a tie below an even neighbour goes down
        (0x3F818000, 0x3F82),  # a tie below an odd one goes up
        (0x3F808001, 0x3F81),  # just above a tie
        (0x3F807FFF, 0x3F80),  # just below
        (0xBF818000, 0xBF82),  # the sign does not matter
        (0x7F7FFFFF, 0x7F80),  # the largest float becomes infinite
        (0x7F800000, 0x7F80),
        (0x80000000, 0x8000),  # minus zero
        (0x00008000, 0x0000),  # a subnormal tie
        (0x00018000, 0x0002),
        (0x7F800001, 0x7FC0),  # a NaN stays one
        (0xFFFFFFFF, 0xFFFF),
    ],
)
def test_bf16_rounds_to_nearest_even(bits: int, expected: int) -> None:
    value = np.array([bits], dtype=np.uint32).view(np.float32)
    assert st.f32_to_bf16(value).tolist() == [expected]


def test_bf16_widening_is_exact() -> None:
    wide = st.bf16_to_f32(np.array([0x3F80, 0xC000, 0x3FC0], np.uint16))
    assert wide.tolist() == [1.0, -2.0, 1.5]


def test_q8_0_block_rounds_halves_away_from_zero() -> None:
    row = np.zeros(32, np.float32)
    row[:7] = [127, 0.5, -0.5, 1.5, 2.5, -2.5, -127]
    quants = [127, 1, -1, 2, 3, -3, -127] + [0] * 25
    raw = struct.pack("<e32b", 1.0, *quants)
    assert blocks.quantize_q8_0(row).tobytes() == raw


def test_q8_0_scale_is_float16_of_a_float32_quotient() -> None:
    row = np.full(32, -12.7, np.float32)
    raw = blocks.quantize_q8_0(row)
    # 0.1 as float16 is 0x2E66, and every byte is -127.
    assert raw.tobytes() == b"\x66\x2e" + b"\x81" * 32
    back = blocks.dequantize_q8_0(raw)
    assert np.allclose(back, -12.7, atol=0.01)


def test_q8_0_block_of_zeros_is_zero_bytes() -> None:
    assert not blocks.quantize_q8_0(np.zeros((2, 64), np.float32)).any()


def test_q8_0_refuses_a_broken_block() -> None:
    with pytest.raises(ValueError, match="48"):
        blocks.quantize_q8_0(np.zeros(48, np.float32))


def test_q8_0_columns_cut_at_blocks_equal_the_cut_matrix() -> None:
    x = checkpoints.uniform(1, "x", (3, 128))
    whole = blocks.quantize_q8_0(x)[:, 68:]
    assert (whole == blocks.quantize_q8_0(x[:, 64:])).all()


def test_q4_1_nibbles_lie_low_then_high() -> None:
    # scale 0.5, minimum -1; byte i holds i low and 15 - i high.
    nibbles = bytes(i | (15 - i) << 4 for i in range(16))
    raw = np.frombuffer(struct.pack("<ee", 0.5, -1.0) + nibbles, np.uint8)
    values = blocks.dequantize_q4_1(raw)
    assert values[:16].tolist() == [i / 2 - 1 for i in range(16)]
    assert values[16:].tolist() == [(15 - i) / 2 - 1 for i in range(16)]


def test_rotary_turns_pairs_half_a_head_apart() -> None:
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    y = llama.rotate(x, np.array([[math.pi / 2, 0.0]]))
    assert np.allclose(y, [[[-3.0, 2.0, 1.0, 4.0]]])


def test_rotary_frequencies() -> None:
    config = {"head_dim": 4, "rope_theta": 100.0}
    assert np.allclose(llama.inverse_frequencies(config), [1.0, 0.1])


def test_llama3_scaling_keeps_fast_and_stretches_slow_pairs() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40 * math.pi,
    }
    # 20, 2 and 0.2 turns: kept, a third of the way (2 - 1) / (4 - 1)
    # from stretched to kept, and stretched.
    config = {"head_dim": 6, "rope_theta": 1000.0, "rope_scaling": rope}
    got = llama.inverse_frequencies(config)
    assert np.allclose(got, [1.0, 0.1 / 3 + 0.2 / 3 / 8, 0.01 / 8])


def test_rms_norm_by_hand() -> None:
    got = llama.rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0)
    root = math.sqrt(12.5)
    assert np.allclose(got, [3 / root, 8 / root])


def test_choice_reports_logprob_and_gap() -> None:
    step = llama.choose(np.log(np.array([1.0, 6.0, 3.0])))
    assert step.token == 1
    assert math.isclose(step.logprob, math.log(0.6))
    assert math.isclose(step.gap, math.log(2))


@pytest.mark.parametrize(("arch", "variant"), LOGITS)
def test_logits_equal_recorded_ones(
    tmp_path: Path, arch: str, variant: str
) -> None:
    checkpoints.make(str(tmp_path), arch, variant, 7)
    model = open_model(str(tmp_path))
    logits = llama.Llama(model).forward(IDS)
    assert np.allclose(logits[-1, :4], LOGITS[arch, variant], atol=2e-4)
    single = llama.Llama(model)
    steps = np.concatenate([single.forward([i]) for i in IDS])
    assert np.allclose(logits, steps, atol=1e-10)


def test_checkpoints_do_not_change(tmp_path: Path) -> None:
    checkpoints.make(str(tmp_path), "llama", "gqa", 7)
    raw = (tmp_path / "model.safetensors").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == LLAMA_GQA_SHA256


def test_shards_hold_what_one_file_does(tmp_path: Path) -> None:
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    checkpoints.make(one, "qwen2", "tied", 3, "BF16")
    checkpoints.make(many, "qwen2", "tied", 3, "BF16", n_shards=4)
    assert not os.path.exists(os.path.join(many, st.SINGLE_NAME))
    a, b = st.read_checkpoint(one), st.read_checkpoint(many)
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype == "BF16"
        assert (a[name].array == b[name].array).all()


def test_permutation_by_hand() -> None:
    rows = np.arange(8)
    paired = [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_io.permute(rows, 2).tolist() == paired
    assert gguf_io.permute(np.arange(6), 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert (gguf_io.unpermute(gguf_io.permute(rows, 2), 2) == rows).all()


@pytest.mark.parametrize("arch", checkpoints.CLASSES)
def test_gguf_holds_what_the_checkpoint_does(
    tmp_path: Path, arch: str
) -> None:
    checkpoints.make(str(tmp_path), arch, "tied", 5, gguf="F32")
    a = open_model(str(tmp_path))
    b = open_model(str(tmp_path / "model.gguf"))
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert (a.tensors[name].array == b.tensors[name].array).all()
    for key in set(b.config) - {"rms_norm_eps"}:
        assert a.config[key] == b.config[key], key
    assert math.isclose(a.config["rms_norm_eps"], b.config["rms_norm_eps"])
    text = "the workers<|im_end|> and 12"
    assert a.tokenizer and b.tokenizer
    assert a.tokenizer.encode(text) == b.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("gpt2", "I'm  at 12:30", ["I", "'m", " ", " at", " 12", ":", "30"]),
        ("smollm", "is 12 plus", ["is", " ", "1", "2", " plus"]),
        ("gpt2", "a \n\n b", ["a", " \n\n", " b"]),
        ("llama3", "x\n\n 1234!?\n", ["x", "\n\n", " ", "123", "4", "!?\n"]),
        ("qwen2", "(ok) 12", ["(ok", ")", " ", "1", "2"]),
        ("gpt2", "Ünï ½", ["Ünï", " ½"]),
    ],
)
def test_pretokenizer_pieces(kind: str, text: str, pieces: list[str]) -> None:
    assert bpe.pretokenize(text, kind) == pieces


def test_bpe_merges_lowest_rank_first() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc", "<s>"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [("b", "c"), ("a", "b"), ("a", "bc")]
    encoder = bpe.Bpe(ids, merges, ["<s>"], "gpt2")
    assert encoder.encode("abc<s>abab") == [5, 6, 3, 3]
    assert encoder.decode([5, 6, 3, 3]) == "abc<s>abab"


def test_byte_alphabet_is_gpt2s() -> None:
    alphabet = bpe.byte_alphabet()
    assert alphabet[ord(" ")] == "Ġ"
    assert alphabet[ord("\n")] == "Ċ"
    assert alphabet[0xAD] == "Ń"
    assert len(set(alphabet)) == 256


def test_kv_heads_are_cut_or_shared() -> None:
    assert [stored.kv_range(r, 2, 4) for r in (0, 1)] == [(0, 2), (2, 4)]
    shared = [stored.kv_range(r, 4, 2)[0] for r in range(4)]
    assert shared == [0, 0, 1, 1]
    assert stored.kv_range(3, 4, 1) == (0, 1)
    with pytest.raises(ValueError, match="3 kv heads over 2 ranks"):
        stored.kv_range(0, 2, 3)


def shard(folder: Path, rank: int, tp: int, form: str) -> dict[str, bytes]:
    """Return the stored bytes of one rank by name."""
    return dict(stored.Shard(open_model(str(folder)), tp, rank, form).stored())


def test_stored_bytes_are_the_checkpoints_own_rows(tmp_path: Path) -> None:
    checkpoints.make(str(tmp_path), "qwen2", "gqa", 2, "BF16")
    got = shard(tmp_path, 1, 2, "bf16")
    raw = {n: t.array for n, t in st.read_checkpoint(str(tmp_path)).items()}
    at = "model.layers.1."
    attn, mlp = f"{at}self_attn.", f"{at}mlp."
    qkv = b"".join(
        raw[f"{attn}{p}_proj.weight"][first:last].tobytes()
        for p, first, last in (("q", 32, 64), ("k", 16, 32), ("v", 16, 32))
    )
    assert got[f"{attn}qkv_proj.weight"] == qkv
    assert got[f"{mlp}gate_up_proj.weight"] == (
        raw[f"{mlp}gate_proj.weight"][64:].tobytes()
        + raw[f"{mlp}up_proj.weight"][64:].tobytes()
    )
    down = raw[f"{mlp}down_proj.weight"][:, 64:].tobytes()
    assert got[f"{mlp}down_proj.weight"] == down
    # A bias is float32: the bf16 bits above sixteen zero bits.
    bias = raw[f"{attn}v_proj.bias"][16:]
    pairs = np.stack([np.zeros_like(bias), bias], axis=1)
    assert got[f"{attn}qkv_proj.bias"][-64:] == pairs.tobytes()
    assert len(got[f"{at}input_layernorm.weight"]) == 64 * 4


def test_pad_rows_of_the_vocabulary_are_zero(tmp_path: Path) -> None:
    checkpoints.make(str(tmp_path), "llama", "padded", 2)
    for form, row in (("f32", 256), ("bf16", 128), ("q8_0", 68)):
        table = shard(tmp_path, 1, 2, form)["lm_head.weight"]
        assert len(table) == 161 * row
        assert table[-row:] == bytes(row)
        assert table[-2 * row : -row] != bytes(row)


def test_tied_head_is_absent_and_keys_are_vllms(tmp_path: Path) -> None:
    checkpoints.make(str(tmp_path), "qwen3", "tied", 2)
    model = open_model(str(tmp_path))
    keys = list(stored.digests(model, 2, 2, "q8_0"))
    assert not any("lm_head" in key for key in keys)
    assert "dp1:pp0:pcp0:tp1:model.layers.2.self_attn.q_norm.weight" in keys
    assert len(keys) == 4 * (3 * 8 + 2)
