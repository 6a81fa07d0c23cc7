# SPDX-License-Identifier: Apache-2.0
"""Tensors cross as views: address, shape, stride, and no copy."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from ferry.errors import ArgumentError, NotSupportedError
from ferry.tensor import DTYPES, dtype_code, dtype_name, view


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_the_library_crosses(name: str) -> None:
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    seen = view("w", tensor)
    assert seen.dtype == DTYPES[name]
    assert seen.address == tensor.data_ptr()
    assert tuple(seen.shape) == (2, 3)
    assert tuple(seen.strides) == (3, 1)
    assert dtype_code(name) == DTYPES[name]


@pytest.mark.parametrize("name", DTYPES)
def test_b6_a_view_is_a_tensor_and_an_array_of_numpy(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name)).t()
    seen = view("w", tensor)
    assert view("w", seen) is seen
    array = np.asarray(seen)
    assert array.shape == (3, 2)
    assert not array.flags.writeable
    assert array.__array_interface__["data"][0] == tensor.data_ptr()
    raw = tensor.contiguous().view(torch.uint8).numpy()
    assert array.tobytes() == raw.tobytes()
    if array.dtype.kind != "V":
        assert array.tolist() == tensor.tolist()
    with pytest.raises(AttributeError, match="device 3"):
        seen._replace(device=4).__array_interface__  # noqa: B018


def test_the_dtypes_are_the_headers() -> None:
    from ferry._ffi import ffi, lib, text
    from ferry.tensor import ALIASES

    out = ffi.new("ferry_dtype *")
    for name, code in DTYPES.items():
        assert lib.ferry_dtype_parse(name.encode(), out) == 0
        assert out[0] == code
        assert text(lib.ferry_dtype_name(code)) == name
    for alias, name in ALIASES.items():
        assert lib.ferry_dtype_parse(alias.encode(), out) == 0
        assert out[0] == DTYPES[name] == dtype_code(alias.upper())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12.0).reshape(3, 4).t(),
        lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
        lambda: torch.arange(12.0)[5],
        lambda: torch.zeros(0, 4),
        lambda: torch.ones(3).expand(4, 3),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "step", "0-d", "empty", "stride 0", "grad", "param"],
)
def test_strides_stand_as_they_are(make: Any) -> None:
    tensor = make()
    seen = view("w", tensor)
    assert tuple(seen.strides) == tensor.stride()
    assert tuple(seen.shape) == tuple(tensor.shape)
    assert seen.address == tensor.data_ptr()


def test_an_inference_tensor_crosses() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2, 2)
    assert view("w", tensor).address == tensor.data_ptr()


def test_numpy_arrays_cross_with_negative_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::2]
    seen = view("w", array)
    assert seen.strides == [-4, 2]
    assert seen.address == array.ctypes.data
    assert dtype_name(np.dtype("bool")) == "bool"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(2, device="meta"), "meta tensor"),
        (lambda: torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.ones([1] * 9), "9 dimensions"),
        (lambda: np.ones(2, dtype=">f4"), "high byte"),
        (lambda: np.ones(2, dtype=[("a", "i1"), ("b", "<f4")])["b"],
         "stride of 5 bytes"),
    ],
)
def test_what_cannot_cross_is_refused_by_name(make: Any, word: str) -> None:
    with pytest.raises(NotSupportedError, match=f"model.w.*{word}"):
        view("model.w", make())


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"model\.w.*list"):
        view("model.w", [1.0])


def test_a_lazy_minus_sign_is_carried_out() -> None:
    lazy = torch.imag(torch.tensor([1 + 2j]).conj())
    assert lazy.is_neg()
    owner: Any = view("w", lazy).owner
    assert owner.tolist() == [-2.0]
    assert not owner.is_neg()


def test_importing_needs_neither_torch_nor_vllm_nor_ray() -> None:
    code = (
        "import sys; import ferry, ferry.weight_transfer as w\n"
        "import ferry.weight_transfer.base, ferry.weight_transfer.factory\n"
        "import ferry.model_executor.model_loader.reload\n"
        "w.WeightTransferTrainerFactory, w.WeightTransferEngineFactory\n"
        "bad = {'torch', 'vllm', 'ray', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_each_status_has_its_exception() -> None:
    import pickle

    from ferry import errors
    from ferry._ffi import lib, text

    names = [n for n in dir(lib) if re.fullmatch(r"FERRY_E[A-Z]+", n)]
    assert len(names) > 20
    for name in names:
        code = getattr(lib, name)
        cls = errors.error_class(code)
        assert cls.code == code, name
        assert f"FERRY_{cls.status}" == name
        assert text(lib.ferry_status_name(code)) == cls.status
        again = pickle.loads(pickle.dumps(cls("words")))
        assert type(again) is cls and str(again) == "words"
    assert issubclass(errors.ArgumentError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.ConnectionFailedError, ConnectionError)
