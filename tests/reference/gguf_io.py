# SPDX-License-Identifier: Apache-2.0
"""Read and write GGUF files (version 2 and 3, little-endian) with NumPy alone.

Layout: magic "GGUF", u32 version, u64 tensors, u64 metadata rows; the rows
(string key, u32 type, value); the tensor rows (string name, u32 dimensions,
u64 each, innermost first, u32 type, u64 offset); padding to the alignment;
the data. A string is a u64 length and its bytes.

Llama files store the rows of q and k for interleaved rotary pairs; `to_hf`
puts them back into the two-halves order that Hugging Face names stand for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import blocks
from safetensors_io import Tensor, bf16_to_f32, f32_to_bf16

MAGIC = b"GGUF"
ALIGNMENT = 32
SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9


class Format(NamedTuple):
    """A tensor type: its number, block length and bytes, both ways."""

    number: int
    n_elements: int
    n_bytes: int
    dequantize: Callable[[np.ndarray], np.ndarray]
    quantize: Callable[[np.ndarray], np.ndarray]


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


FORMATS = {
    "F32": Format(
        0, 1, 4, lambda raw: raw.view("<f4"),
        lambda x: _as_bytes(x.astype("<f4")),
    ),
    "F16": Format(
        1, 1, 2, lambda raw: raw.view("<f2").astype(np.float32),
        lambda x: _as_bytes(x.astype("<f2")),
    ),
    "Q4_1": Format(
        3, 32, 20, blocks.dequantize_q4_1, blocks.quantize_q4_1,
    ),
    "Q8_0": Format(
        8, 32, 34, blocks.dequantize_q8_0, blocks.quantize_q8_0,
    ),
    "BF16": Format(
        30, 1, 2, lambda raw: bf16_to_f32(raw.view("<u2")),
        lambda x: _as_bytes(f32_to_bf16(x)),
    ),
}  # fmt: skip
NAME_OF = {form.number: name for name, form in FORMATS.items()}


class GgufTensor(NamedTuple):
    """A tensor as stored: its format, outer-first shape and raw rows."""

    kind: str
    shape: tuple[int, ...]
    raw: np.ndarray

    def f32(self) -> np.ndarray:
        """Return the dequantised float32 values, outer dimension first."""
        return FORMATS[self.kind].dequantize(self.raw).reshape(self.shape)


class GgufFile(NamedTuple):
    """All of a file: metadata and tensors, in file order."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def _number(src: BinaryIO, form: str) -> Any:
    raw = src.read(struct.calcsize(form))
    return struct.unpack(form, raw)[0]


def _string(src: BinaryIO) -> str:
    return src.read(_number(src, "<Q")).decode()


def _value(src: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(src)
    if kind == ARRAY:
        inner = _number(src, "<I")
        return [_value(src, inner) for _ in range(_number(src, "<Q"))]
    return _number(src, SCALARS[kind])


def read_file(path: str) -> GgufFile:
    """Read a GGUF file; the tensors' raw bytes are maps of it."""
    metadata, infos = {}, []
    with open(path, "rb") as src:
        if src.read(4) != MAGIC:
            raise ValueError(f"{path}: not a GGUF file")
        version = _number(src, "<I")
        if version not in (2, 3):
            raise ValueError(f"{path}: version {version}")
        n_tensors, n_rows = _number(src, "<Q"), _number(src, "<Q")
        for _ in range(n_rows):
            key = _string(src)
            metadata[key] = _value(src, _number(src, "<I"))
        for _ in range(n_tensors):
            name = _string(src)
            dims = [_number(src, "<Q") for _ in range(_number(src, "<I"))]
            kind = _number(src, "<I")
            infos.append((name, dims, kind, _number(src, "<Q")))
        header = src.tell()
    align = metadata.get("general.alignment", ALIGNMENT)
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    data = whole[(header + align - 1) // align * align :]
    tensors = {}
    for name, dims, kind, offset in infos:
        form = FORMATS[NAME_OF[kind]]
        row = dims[0] // form.n_elements * form.n_bytes
        shape = tuple(reversed(dims))
        n_bytes = math.prod(shape[:-1]) * row
        raw = np.array(data[offset : offset + n_bytes])
        raw = raw.reshape(*shape[:-1], row)
        tensors[name] = GgufTensor(NAME_OF[kind], shape, raw)
    return GgufFile(metadata, tensors)


def _pack_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pack_value(value: Any) -> bytes:
    """Pack a type word and a value; an int is u32, a float f32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _pack_string(value)
    items = [_pack_value(item) for item in value]
    inner = items[0][:4] if items else struct.pack("<I", 4)
    out = struct.pack("<I", ARRAY) + inner + struct.pack("<Q", len(items))
    return out + b"".join(item[4:] for item in items)


def write_file(
    path: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, np.ndarray]],
) -> None:
    """Write version 3; tensors are name: (format, float32 values)."""
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _pack_string(key) + _pack_value(value)
    data = b""
    for name, (kind, values) in tensors.items():
        form = FORMATS[kind]
        head += _pack_string(name) + struct.pack("<I", values.ndim)
        for dim in reversed(values.shape):
            head += struct.pack("<Q", dim)
        head += struct.pack("<IQ", form.number, len(data))
        data += form.quantize(values).tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGNMENT) + data)


def permute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder rotary rows from two halves (a, b) to pairs (a0 b0 a1 ...)."""
    half = rows.shape[0] // n_heads // 2
    view = rows.reshape(n_heads, 2, half, *rows.shape[1:])
    return view.swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo `permute`."""
    half = rows.shape[0] // n_heads // 2
    view = rows.reshape(n_heads, half, 2, *rows.shape[1:])
    return view.swapaxes(1, 2).reshape(rows.shape)


HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_LAYER_NAMES = {hf: own for own, hf in HF_LAYER_NAMES.items()}
HF_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_TOP_NAMES = {hf: own for own, hf in HF_TOP_NAMES.items()}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_name(name: str) -> str | None:
    """Return the Hugging Face name of a GGUF tensor, None if it has none."""
    if name in HF_TOP_NAMES:
        return HF_TOP_NAMES[name]
    parts = name.split(".")
    if parts[0] != "blk" or parts[2] not in HF_LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{HF_LAYER_NAMES[parts[2]]}.{parts[3]}"


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face parameter."""
    if name in GGUF_TOP_NAMES:
        return GGUF_TOP_NAMES[name]
    parts = name.split(".")
    inner = GGUF_LAYER_NAMES[".".join(parts[3:-1])]
    return f"blk.{parts[2]}.{inner}.{parts[-1]}"


def to_config(gguf: GgufFile) -> dict[str, Any]:
    """Say the metadata in the words of a Hugging Face config.json."""
    meta = gguf.metadata
    arch = meta["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return meta.get(f"{arch}.{key}", default)

    n_heads = get("attention.head_count")
    hidden = get("embedding_length")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": get("attention.head_count_kv", n_heads),
        "head_dim": get("attention.key_length", hidden // n_heads),
        # The file says 1e-5 in float32; take the decimal that was meant.
        "rms_norm_eps": float(
            f"{get('attention.layer_norm_rms_epsilon'):.6g}"
        ),
        "rope_theta": get("rope.freq_base", 10000.0),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def to_hf(gguf: GgufFile) -> dict[str, Tensor]:
    """Return dequantised float32 tensors under their Hugging Face names."""
    config = to_config(gguf)
    llama = gguf.metadata["general.architecture"] == "llama"
    out = {}
    for own, tensor in gguf.tensors.items():
        name = hf_name(own)
        if name is None:
            continue
        values = tensor.f32()
        if llama and ".q_proj." in name:
            values = unpermute(values, config["num_attention_heads"])
        if llama and ".k_proj." in name:
            values = unpermute(values, config["num_key_value_heads"])
        out[name] = Tensor("F32", np.ascontiguousarray(values))
    return out


def from_hf(
    path: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any],
    kind: str,
) -> None:
    """Write a GGUF of a checkpoint, 2-D weights in format `kind`.

    A tied head is left out, norms and biases are F32, and the embedding is
    Q8_0 beside Q4_1 weights, as files in the field have it. Rotary scaling
    has no metadata of its own in this form and is refused.
    """
    if config.get("rope_scaling") or config.get("rope_parameters"):
        raise ValueError("rotary scaling is not written to GGUF here")
    names = {full: own for own, full in ARCHITECTURES.items()}
    arch = names[config["architectures"][0]]
    vocab = tokenizer["model"]["vocab"]
    added = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    ids = {number: token for token, number in {**vocab, **added}.items()}
    n_vocab = config["vocab_size"]
    metadata = {
        "general.architecture": arch,
        "general.alignment": ALIGNMENT,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.vocab_size": n_vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [
            ids.get(i, f"[PAD{i}]") for i in range(n_vocab)
        ],
        # 1 is an ordinary token, 3 a control token, 5 one never used.
        "tokenizer.ggml.token_type": [
            3 if ids.get(i) in added else 1 if i in ids else 5
            for i in range(n_vocab)
        ],
        "tokenizer.ggml.merges": [
            " ".join(pair) for pair in tokenizer["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    out = {}
    for name, tensor in tensors.items():
        values = tensor.f32()
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config["num_key_value_heads"])
        own = "F32" if values.ndim == 1 else kind
        if own == "Q4_1" and name == "model.embed_tokens.weight":
            own = "Q8_0"
        out[gguf_name(name)] = (own, np.ascontiguousarray(values))
    write_file(path, metadata, out)
