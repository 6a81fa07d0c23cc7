# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch and arrays of NumPy as strided views, without a copy.

A view is an address, a dtype, a shape and strides. Neither library is
imported here: a tensor is known by what it offers. Invariant: whoever holds a
view holds the tensor too, since the view owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ferry.errors import ArgumentError, NotSupportedError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "MAX_DIMS",
    "View",
    "dtype_code",
    "dtype_name",
    "view",
]

MAX_DIMS = 8

# torch's names; the values are pinned in ferry/tensor.h.
DTYPES: dict[str, int] = {
    "float64": 1,
    "float32": 2,
    "float16": 3,
    "bfloat16": 4,
    "float8_e4m3fn": 5,
    "float8_e5m2": 6,
    "int64": 7,
    "int32": 8,
    "int16": 9,
    "int8": 10,
    "uint64": 11,
    "uint32": 12,
    "uint16": 13,
    "uint8": 14,
    "bool": 15,
}

DTYPE_NAMES = {code: name for name, code in DTYPES.items()}

# Other names that the library takes, in any case of letters.
ALIASES: dict[str, str] = {
    "f64": "float64",
    "double": "float64",
    "f32": "float32",
    "float": "float32",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "long": "int64",
    "int": "int32",
    "short": "int16",
}

# By code.
_NUMPY_KINDS = ("f8", "f4", "f2", "V2", "V1", "V1", "i8", "i4", "i2", "i1",
                "u8", "u4", "u2", "u1", "b1")

_codes: dict[Any, int] = {}


class View(NamedTuple):
    """A strided view of memory that something else owns.

    Attributes
    ----------
    address : int
        Address of element [0, 0, …]; 0 only where there is no element.
    dtype : int
        Code as in `DTYPES`.
    shape : Sequence[int]
        Elements per dimension, at most 8 dimensions; ``()`` is a scalar.
    strides : Sequence[int]
        Elements from one index to the next, any sign.
    owner : object
        What must be kept alive while the view is read.
    device : int
        0 for memory of the host, 1 + n for that of CUDA device n.
    """

    address: int
    dtype: int
    shape: Sequence[int]
    strides: Sequence[int]
    owner: object
    device: int = 0

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's own look at it, read-only; bfloat16 and float8 are raw."""
        if self.device:
            raise AttributeError(f"lies on CUDA device {self.device - 1}")
        kind = _NUMPY_KINDS[self.dtype - 1]
        return {
            "version": 3,
            "typestr": f"<{kind}",
            "shape": tuple(self.shape),
            "strides": tuple(int(kind[1:]) * step for step in self.strides),
            "data": (self.address, True),
        }


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a dtype ("bfloat16") of torch or NumPy."""
    if isinstance(dtype, str):
        name = dtype
    elif isinstance(dtype, type):  # a scalar type of NumPy, or Python's bool
        name = dtype.__name__.rstrip("_")
    else:
        name = getattr(dtype, "name", None) or str(dtype)
    return name.rpartition(".")[2]


def dtype_code(dtype: Any, parameter: str = "") -> int:
    """Return the code of a dtype of torch or NumPy, or of its name.

    Raises
    ------
    NotSupportedError
        A dtype that does not travel, naming `parameter`.
    """
    try:
        return _codes[dtype]
    except (KeyError, TypeError):
        pass
    name = dtype_name(dtype).lower()
    code = DTYPES.get(ALIASES.get(name, name))
    if code is None:
        raise NotSupportedError(
            f"parameter {parameter}: dtype {dtype_name(dtype)} does not "
            f"travel; known are {', '.join(DTYPES)}"
        )
    try:
        _codes[dtype] = code
    except TypeError:
        pass
    return code


def _refuse(name: str, why: str) -> NotSupportedError:
    return NotSupportedError(f"parameter {name}: {why}")


# Kinds of torch tensors that were found fine, by what decides it.
_plain: dict[tuple[Any, ...], tuple[int, int]] = {}


def _torch_kind(name: str, tensor: Any) -> tuple[int, int]:
    """Return dtype code and device of a kind of tensors that can cross."""
    if tensor.is_meta:
        raise _refuse(name, "is a meta tensor, which has no data")
    if hasattr(tensor, "full_tensor"):
        raise _refuse(
            name, "is a DTensor; a source yields full tensors (full_tensor())"
        )
    if tensor.is_quantized:
        raise _refuse(name, "is a quantized tensor; send its integers")
    if str(tensor.layout) != "torch.strided":
        raise _refuse(name, f"has layout {tensor.layout}, not strided")
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise _refuse(
            name, f"lies on {device}; memory of the host and of CUDA is read")
    number = 0 if device.type == "cpu" else 1 + device.index
    return dtype_code(tensor.dtype, name), number


def _torch_view(name: str, tensor: Any) -> View:
    """View of a torch tensor; its bytes are not touched."""
    if tensor.is_nested:  # which has neither shape nor strides
        raise _refuse(name, "is a nested tensor")
    kind = (type(tensor), tensor.dtype, tensor.layout, tensor.device)
    known = _plain.get(kind)
    if known is None:
        known = _plain[kind] = _torch_kind(name, tensor)
    code, device = known
    if tensor.is_neg():  # a lazy minus sign that the bytes do not have
        tensor = tensor.resolve_neg()
    if tensor.dim() > MAX_DIMS:
        raise _refuse(
            name, f"has {tensor.dim()} dimensions, at most {MAX_DIMS} travel"
        )
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise _refuse(name, f"has no data of its own ({error})") from error
    if address == 0 and tensor.numel() > 0:
        raise _refuse(name, "has no storage")
    return View(address, code, tensor.shape, tensor.stride(), tensor, device)


def _array_view(name: str, array: Any) -> View:
    """View of a NumPy array, or of what offers its interface."""
    interface: dict[str, Any] = array.__array_interface__
    dtype = array.dtype
    if dtype.byteorder == ">":
        raise _refuse(name, "is stored with the high byte first")
    code = dtype_code(dtype, name)
    shape: tuple[int, ...] = interface["shape"]
    if len(shape) > MAX_DIMS:
        raise _refuse(
            name, f"has {len(shape)} dimensions, at most {MAX_DIMS} travel"
        )
    strides = []
    for step in array.strides:
        if step % dtype.itemsize != 0:
            raise _refuse(
                name,
                f"has a stride of {step} bytes, which is no multiple of its "
                f"element's {dtype.itemsize}",
            )
        strides.append(step // dtype.itemsize)
    return View(interface["data"][0], code, shape, strides, array)


def view(name: str, tensor: Any) -> View:
    """Describe a tensor without copying it.

    Parameters
    ----------
    name : str
        The parameter, for errors.
    tensor : torch.Tensor, numpy.ndarray or View
        Any strides; memory of the host or of a CUDA device. Requires-grad
        and inference tensors, 0-d and empty ones are fine. Work that still
        writes the bytes is not waited for here.

    Raises
    ------
    NotSupportedError
        A tensor without bytes that can be read here: meta, sharded, sparse,
        on a device of another kind; naming the parameter.
    ArgumentError
        Not a tensor at all.
    """
    if isinstance(tensor, View):
        return tensor
    if hasattr(tensor, "data_ptr"):
        return _torch_view(name, tensor)
    if hasattr(tensor, "__array_interface__"):
        return _array_view(name, tensor)
    raise ArgumentError(
        f"parameter {name}: expected a tensor, got {type(tensor).__name__}"
    )
