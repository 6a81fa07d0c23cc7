# SPDX-License-Identifier: Apache-2.0
"""Read and write safetensors files and sharded checkpoints with NumPy alone.

A tensor is a pair (dtype, array): dtype is the file's own word ("F32", "F16",
"BF16", ...), and the array of a BF16 tensor holds its bits as uint16. Bytes
are never converted here: what is read is what the file stores.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

NUMPY_OF: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class Tensor(NamedTuple):
    """The stored form of a tensor: its dtype word and its elements."""

    dtype: str
    array: np.ndarray

    def f32(self) -> np.ndarray:
        """Return the values as float32; exact for F32, F16 and BF16."""
        if self.dtype == "BF16":
            return bf16_to_f32(self.array)
        return self.array.astype(np.float32)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bits (uint16) to float32; exact."""
    wide = np.asarray(bits).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits (uint16), to nearest, ties to even.

    A NaN keeps its sign and the upper bits of its payload and is made quiet,
    since rounding its bits as a number could turn it into an infinity.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = (bits + np.uint64(0x7FFF) + odd) >> np.uint64(16)
    quiet = (bits >> np.uint64(16)) | np.uint64(0x40)
    out = np.where(np.isnan(values), quiet, rounded)
    return out.astype(np.uint16)


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """Convert between F32, F16 and BF16 by way of float32."""
    if tensor.dtype == dtype:
        return tensor
    values = tensor.f32()
    if dtype == "BF16":
        return Tensor(dtype, f32_to_bf16(values))
    if dtype not in ("F32", "F16"):
        raise ValueError(f"cannot cast {tensor.dtype} to {dtype}")
    return Tensor(dtype, values.astype(NUMPY_OF[dtype]))


def write_file(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Write one file, tensors in the order of the mapping, no gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.array.dtype != NUMPY_OF[tensor.dtype]:
            raise ValueError(
                f"tensor {name}: {tensor.dtype} held as {tensor.array.dtype}"
            )
        end = offset + tensor.array.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor.array).tobytes())


def read_file(path: str) -> dict[str, Tensor]:
    """Read one file; the arrays are copies of its bytes."""
    size = os.path.getsize(path)
    with open(path, "rb") as src:
        (n_header,) = struct.unpack("<Q", src.read(8))
        if n_header > size - 8:
            raise ValueError(f"{path}: header of {n_header} in {size} bytes")
        header = json.loads(src.read(n_header))
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    data = whole[8 + n_header :]
    tensors = {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        begin, end = row["data_offsets"]
        dtype = NUMPY_OF[row["dtype"]]
        count = int(np.prod(row["shape"], dtype=np.int64))
        if end - begin != count * dtype.itemsize or end > data.size:
            raise ValueError(f"{path}: tensor {name} has wrong offsets")
        # A copy of unaligned bytes: a view would need their alignment.
        raw = np.array(data[begin:end])
        tensors[name] = Tensor(
            row["dtype"], raw.view(dtype).reshape(row["shape"])
        )
    return tensors


def write_checkpoint(
    folder: str, tensors: Mapping[str, Tensor], n_shards: int = 1
) -> None:
    """Write model.safetensors, or n_shards files and their index."""
    if n_shards == 1:
        write_file(os.path.join(folder, SINGLE_NAME), tensors)
        return
    names = list(tensors)
    if n_shards > len(names):
        raise ValueError(f"{n_shards} shards for {len(names)} tensors")
    weight_map = {}
    for i in range(n_shards):
        first = i * len(names) // n_shards
        last = (i + 1) * len(names) // n_shards
        file_name = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[first:last]}
        write_file(os.path.join(folder, file_name), part)
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(tensor.array.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with open(os.path.join(folder, INDEX_NAME), "w") as out:
        json.dump(index, out, indent=2)
        out.write("\n")


def read_checkpoint(folder: str) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint directory, single or sharded."""
    single = os.path.join(folder, SINGLE_NAME)
    if os.path.exists(single):
        return read_file(single)
    with open(os.path.join(folder, INDEX_NAME)) as src:
        weight_map = json.load(src)["weight_map"]
    files = {
        file_name: read_file(os.path.join(folder, file_name))
        for file_name in sorted(set(weight_map.values()))
    }
    return {name: files[part][name] for name, part in weight_map.items()}
