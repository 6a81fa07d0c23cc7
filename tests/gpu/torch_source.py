# SPDX-License-Identifier: Apache-2.0
"""torch's CUDA tensors through the binding: described without a copy, read
after the stream that writes them, with the bytes that torch itself sees.

Run by tests/gpu/run.sh with FERRY_LIBRARY; ends with 77 where there is
nothing to run on.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any


def skip(why: str) -> None:
    print(f"skipped: {why}")
    sys.exit(77)


try:
    import torch
except ImportError as error:
    skip(f"no torch here ({error})")
if not torch.cuda.is_available():
    skip("this torch sees no CUDA device")
try:
    from ferry import _ffi_source
    from ferry._ffi import Failures, ffi
    from ferry.source import ParamMeta, WeightSource, adapt
except ImportError as error:
    skip(f"the binding was not built ({error})")

lib = ctypes.CDLL(os.environ["FERRY_LIBRARY"])
SINK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p,
                        ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
lib.ferry__copy_range.argtypes = [
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
lib.ferry__copy_range.restype = None
lib.ferry__fetch_begin.argtypes = [
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
lib.ferry__fetch_pack.argtypes = [
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, SINK,
    ctypes.c_void_p]
lib.ferry__fetch_rest.argtypes = [ctypes.c_void_p]
fetcher = ctypes.create_string_buffer(16384)  # zeroed; more than it needs


@SINK
def sink(_: int, view: int, first: int, count: int, out: int) -> None:
    lib.ferry__copy_range(view, first, count, out)


def bytes_of(item: Any, count: int, size: int) -> bytes:
    """What the library reads of an item."""
    out = ctypes.create_string_buffer(max(size, 1))
    address = int(ffi.cast("uintptr_t", ffi.addressof(item.tensor)))
    assert lib.ferry__fetch_begin(fetcher, b"w", address) == 0
    assert lib.ferry__fetch_pack(fetcher, 0, count, out, sink, None) == 0
    lib.ferry__fetch_rest(fetcher)
    return out.raw[:size]


def want(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


class Held(WeightSource):
    """Yields what `make` makes, one after another or at once."""

    def __init__(self, make: dict[str, Any], stable: bool) -> None:
        self.make, self.stable = make, stable

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, m().dtype, tuple(m().shape))
                for n, m in self.make.items()]

    def __iter__(self) -> Any:
        for name, make in self.make.items():
            yield name, make()


def drive(source: Held) -> Any:
    driven = _ffi_source.Source(adapt(source), Failures())
    ops, own = driven.c.ops, driven.c.self
    params, count = ffi.new("ferry_param_meta **"), ffi.new("size_t *")
    assert ops.metadata(own, params, count) == 0
    assert ops.begin(own) == 0
    item = ffi.new("ferry_item *")
    while (code := ops.next(own, item)) == 0:
        until = time.monotonic() + 60
        waits = 0
        if item.wait != ffi.NULL:
            while item.wait(item.wait_arg, 50) != 0:
                waits += 1
                assert time.monotonic() < until
        yield item, waits
    ops.end(own)
    assert code > 0, driven.failures._met


LAST = torch.cuda.device_count() - 1
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8,
          torch.uint8, torch.bool]


def tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(300, 700, device=f"cuda:{LAST}")
    found = {
        "plain": base,
        "transposed": base.t(),
        "columns": base[:, 10:200],
        "steps": base[::3, ::2],
        "spread": base[:1].expand(50, 700),
        "scalar": base[3, 4],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base.clone()),
        "large": torch.randn(5000, 3000, device="cuda:0"),
        "large transposed": torch.randn(5000, 3000, device="cuda:0").t(),
    }
    for dtype in DTYPES:
        raw = torch.randint(0, 2, (40, 60), device="cuda:0")
        found[str(dtype)] = raw.to(dtype)
    return found


def every_tensor_is_read_where_it_lies() -> None:
    for stable in (False, True):
        found = tensors()
        names = iter(found)
        source = Held({n: lambda t=t: t for n, t in found.items()}, stable)
        for item, _ in drive(source):
            tensor = found[next(names)]
            assert item.tensor.device == 1 + tensor.device.index
            size = tensor.numel() * tensor.element_size()
            assert bytes_of(item, tensor.numel(), size) == want(tensor)
        assert next(names, None) is None


def plain_tensors_are_described_in_c() -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        print("    not so: this torch has no table of DLPack functions")
        return
    kept, _ffi_source.fill_tensor = _ffi_source.fill_tensor, None
    try:
        found = tensors()
        source = Held({n: lambda t=t: t for n, t in found.items()}, True)
        assert len(list(drive(source))) == len(found)
    finally:
        _ffi_source.fill_tensor = kept


def o31_bytes_are_read_after_their_stream() -> None:
    side = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device="cuda:0")
    waited = 0
    for turn in range(100):
        def late(turn: int = turn) -> torch.Tensor:
            # Both ways: the caller's stream is the side one, or waits for it.
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                tensor.fill_(float(turn))
            torch.cuda.current_stream().wait_stream(side)
            return tensor

        source = Held({"w": late}, turn % 2 == 0)
        source.metadata = lambda: [  # type: ignore[method-assign]
            ParamMeta("w", tensor.dtype, tuple(tensor.shape))]
        for item, waits in drive(source):
            waited += waits
            raw = bytes_of(item, tensor.numel(), tensor.numel() * 4)
            assert raw == torch.full_like(
                tensor, float(turn), device="cpu").numpy().tobytes(), turn
    print(f"    the device was waited for {waited} times in 100 rounds")


def main() -> None:
    print(f"torch {torch.__version__}, {LAST + 1} device(s)")
    for case in (every_tensor_is_read_where_it_lies,
                 plain_tensors_are_described_in_c,
                 o31_bytes_are_read_after_their_stream):
        began = time.monotonic()
        case()
        print(f"ok  {case.__name__}, {(time.monotonic() - began) * 1e3:.1f} ms")


main()
