# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE, from a GGUF's own vocabulary or from a tokenizer.json.

The pre-tokeniser's regular expressions speak of Unicode classes that Python's
`re` lacks. So each character is first folded to an ASCII one of its class, one
for one, and an ASCII expression cuts the folded text; the cuts hold for both.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = re.compile(
    CONTRACTIONS
    + r"| ?[A-Za-z]+| ?[0-9]+| ?[^ \t\r\nA-Za-z0-9]+"
    + r"|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
)
WORDS_AND_LINES = (
    rf"(?i:{CONTRACTIONS})|[^\r\nA-Za-z0-9]?[A-Za-z]+|%s"
    r"| ?[^ \t\r\nA-Za-z0-9]+[\r\n]*|[ \t\r\n]*[\r\n]+"
    r"|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
)
LLAMA3 = re.compile(WORDS_AND_LINES % r"[0-9]{1,3}")
QWEN2 = re.compile(WORDS_AND_LINES % r"[0-9]")
DIGIT = re.compile(r"[0-9]|[^0-9]+")

# Each pre-tokeniser is a list of cuts, the next made inside the pieces of the
# one before: a look-ahead does not see past the end of its piece.
PRETOKENIZERS = {
    "gpt2": [GPT2],
    "smollm": [DIGIT, GPT2],
    "llama3": [LLAMA3],
    "qwen2": [QWEN2],
}


def byte_alphabet() -> list[str]:
    """Return the printable character that stands for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet, extra = [], 0
    for byte in range(256):
        if byte in plain:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(256 + extra))
            extra += 1
    return alphabet


def fold(text: str) -> str:
    """Replace each character by an ASCII one of the same class."""
    out = []
    for char in text:
        if char < "\x80" and (char.isalnum() or char in " \t\r\n'"):
            out.append(char)
        elif char.isspace() and not "\x1c" <= char <= "\x1f":
            out.append("\t")
        else:
            major = unicodedata.category(char)[0]
            out.append({"L": "a", "N": "0"}.get(major, "!"))
    return "".join(out)


def pretokenize(text: str, kind: str) -> list[str]:
    """Cut text into the pieces inside which BPE may merge."""
    pieces = [text] if text else []
    for pattern in PRETOKENIZERS[kind]:
        finer: list[str] = []
        for piece in pieces:
            spans = [m.span() for m in pattern.finditer(fold(piece))]
            finer.extend(piece[begin:end] for begin, end in spans)
        pieces = finer
    return pieces


class Bpe:
    """An encoder and decoder over one vocabulary."""

    def __init__(
        self,
        ids: dict[str, int],
        merges: Iterable[tuple[str, str]],
        special: Iterable[str],
        pretokenizer: str,
    ) -> None:
        self.ids = ids
        self.tokens = {number: token for token, number in ids.items()}
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.special = sorted(special, key=len, reverse=True)
        self.pretokenizer = pretokenizer
        self.alphabet = byte_alphabet()
        self.byte_of = {c: byte for byte, c in enumerate(self.alphabet)}

    def encode_piece(self, piece: str) -> list[int]:
        """Merge the lowest-ranked pair, leftmost first, until none is."""
        parts = [self.alphabet[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:], strict=False))
            best = min(pairs, key=lambda p: self.ranks.get(p, 1 << 60))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [self.ids[part] for part in parts]

    def encode(self, text: str) -> list[int]:
        """Return the ids of text; special tokens are read as such."""
        out = []
        cut = "|".join(re.escape(token) for token in self.special)
        for part in re.split(f"({cut})", text) if cut else [text]:
            if part in self.special:
                out.append(self.ids[part])
                continue
            for piece in pretokenize(part, self.pretokenizer):
                out.extend(self.encode_piece(piece))
        return out

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; broken UTF-8 becomes U+FFFD."""
        out = b""
        for number in ids:
            token = self.tokens[number]
            if token in self.special:
                out += token.encode()
            else:
                out += bytes(self.byte_of[char] for char in token)
        return out.decode(errors="replace")


def merge_pair(row: str | Sequence[str]) -> tuple[str, str]:
    """Read a merge in either of its two forms: "a b" or ["a", "b"]."""
    first, second = row.split(" ") if isinstance(row, str) else row
    return first, second


def from_gguf(metadata: dict[str, Any]) -> Bpe:
    """Take tokens, merges and pre-tokeniser from a GGUF's metadata."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    merges = metadata["tokenizer.ggml.merges"]
    kind = {"llama-bpe": "llama3", "gpt-2": "gpt2"}.get(
        metadata["tokenizer.ggml.pre"], metadata["tokenizer.ggml.pre"]
    )
    # 3 is a control token, 4 one that a user added.
    special = [t for t, k in zip(tokens, types, strict=True) if k in (3, 4)]
    ids = {token: number for number, token in enumerate(tokens)}
    return Bpe(ids, [merge_pair(m) for m in merges], special, kind)


def pretokenizer_of(spec: dict[str, Any]) -> str:
    """Name the pre-tokeniser that a tokenizer.json describes."""
    parts = spec.get("pretokenizers", [spec])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return "gpt2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        long_digits = "{1,3}" in parts[0]["pattern"]["Regex"]
        return "llama3" if long_digits else "qwen2"
    raise ValueError(f"unknown pre-tokeniser {kinds}")


def from_tokenizer_json(path: str) -> Bpe:
    """Take the tokeniser from a Hugging Face tokenizer.json."""
    with open(path, encoding="utf-8") as src:
        spec = json.load(src)
    model = spec["model"]
    pairs = [merge_pair(row) for row in model["merges"]]
    ids = dict(model["vocab"])
    special = []
    for token in spec["added_tokens"]:
        ids[token["content"]] = token["id"]
        special.append(token["content"])
    kind = pretokenizer_of(spec["pre_tokenizer"])
    return Bpe(ids, pairs, special, kind)
