# SPDX-License-Identifier: Apache-2.0
"""ggml's block formats Q8_0 and Q4_1, as raw bytes along the last dimension.

A Q8_0 block is a float16 scale and 32 signed bytes (34 bytes). A Q4_1 block is
a float16 scale, a float16 minimum and 16 bytes of nibbles, the low ones being
elements 0 to 15 and the high ones 16 to 31 (20 bytes). Little-endian.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
Q8_0_BYTES = 34
Q4_1_BYTES = 20


def round_half_away(values: np.ndarray) -> np.ndarray:
    """Round as C's roundf does: halves go away from zero.

    Adding 0.5 in float32 could itself round up; in float64 it is exact for
    every float32 that a quantised byte can come from.
    """
    wide = values.astype(np.float64)
    return np.copysign(np.floor(np.abs(wide) + 0.5), wide)


def quantize_q8_0(rows: np.ndarray) -> np.ndarray:
    """Quantise float32 rows; (..., n) becomes uint8 (..., n / 32 * 34).

    The scale is kept as float16 but the bytes are made with the float32
    scale's reciprocal, and the product is rounded in float32 first.
    """
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    n = rows.shape[-1]
    if n % BLOCK:
        raise ValueError(f"rows of {n} are not whole blocks of {BLOCK}")
    x = rows.reshape(-1, BLOCK)
    scale = np.abs(x).max(axis=1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    quants = round_half_away(x * inverse[:, None].astype(np.float32))
    out = np.empty((x.shape[0], Q8_0_BYTES), dtype=np.uint8)
    out[:, :2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:] = quants.astype(np.int8).view(np.uint8)
    return out.reshape(*rows.shape[:-1], n // BLOCK * Q8_0_BYTES)


def dequantize_q8_0(raw: np.ndarray) -> np.ndarray:
    """Return float32 rows of uint8 (..., blocks * 34)."""
    blocks = np.ascontiguousarray(raw).reshape(-1, Q8_0_BYTES)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    quants = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
    n = raw.shape[-1] // Q8_0_BYTES * BLOCK
    return (quants * scale).reshape(*raw.shape[:-1], n)


def dequantize_q4_1(raw: np.ndarray) -> np.ndarray:
    """Return float32 rows of uint8 (..., blocks * 20)."""
    blocks = np.ascontiguousarray(raw).reshape(-1, Q4_1_BYTES)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
    quants = np.concatenate([low, high], axis=1).astype(np.float32)
    n = raw.shape[-1] // Q4_1_BYTES * BLOCK
    return (quants * scale + minimum).reshape(*raw.shape[:-1], n)


def quantize_q4_1(rows: np.ndarray) -> np.ndarray:
    """Quantise float32 rows to Q4_1; only ever read back, so any
    rounding will do and no other implementation need agree."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    n = rows.shape[-1]
    if n % BLOCK:
        raise ValueError(f"rows of {n} are not whole blocks of {BLOCK}")
    x = rows.reshape(-1, BLOCK)
    minimum = x.min(axis=1)
    scale = (x.max(axis=1) - minimum) / np.float32(15)
    safe = np.where(scale > 0, scale, np.float32(1))
    quants = np.rint((x - minimum[:, None]) / safe[:, None])
    quants = np.clip(quants, 0, 15).astype(np.uint8)
    out = np.empty((x.shape[0], Q4_1_BYTES), dtype=np.uint8)
    out[:, :2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:4] = minimum.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 4:] = quants[:, :16] | quants[:, 16:] << 4
    return out.reshape(*rows.shape[:-1], n // BLOCK * Q4_1_BYTES)
