# SPDX-License-Identifier: Apache-2.0
"""Tensors of every kind on their way from torch into a worker's memory, by
`ipc` and by `nccl`, in processes of their own: scalars, tensors without an
element, strides, float8, buffers smaller and larger than what travels
(O-22 to O-24, O-26 to O-28, O-30, O-31)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Bent, Items, Receiving
from ferry.errors import MismatchError, NotSupportedError
from ferry.weight_transfer import ParamMeta

# How the bytes are cut: whole, in small buffers, and not packed.
CUTS: list[dict[str, Any]] = [
    {"packed": True, "packed_buffer_size_bytes": 1 << 20},
    {"packed": True, "packed_buffer_size_bytes": 8},
    {"packed": False},
]
cuts = pytest.mark.parametrize("cut", CUTS, ids=["whole", "eight", "single"])


def sent(
    receiver: Receiving, tensors: dict[str, Any], rounds: int = 2,
    **info: Any,
) -> Any:
    """Send and hold every byte against what torch has; gives the figures."""
    with receiver.trains(Items(tensors), **info) as engine:
        for _ in range(rounds):
            engine.send_weights()
            receiver.holds(tensors)
        return engine.stats


@cuts
def test_o23_scalars_of_no_dimension(
    receiver: Receiving, cut: dict[str, Any]
) -> None:
    tensors = {
        "a": torch.tensor(1.5),
        "b": torch.tensor([1, -2, 3], dtype=torch.bfloat16),
        "c": torch.tensor(-0.25),
    }
    assert sent(receiver, tensors, **cut).n_params == 3


@cuts
def test_o24_tensors_without_an_element(
    receiver: Receiving, cut: dict[str, Any]
) -> None:
    """Accepted and counted, wherever they stand, and alone; of a class of
    one's own too."""
    class Own(torch.Tensor):
        pass

    some = {
        "first": torch.zeros(0, 4), "a": torch.arange(6.0).reshape(2, 3),
        "middle": torch.zeros(3, 0, dtype=torch.bfloat16),
        "b": torch.arange(5, dtype=torch.uint8), "last": torch.zeros(0),
    }
    assert sent(receiver, some, **cut).n_params == 5
    none = {"only": torch.zeros(0, 4), "too": torch.zeros(3, 0),
            "own": torch.zeros(0).as_subclass(Own)}
    stats = sent(receiver, none, **cut)
    assert (stats.n_params, stats.bytes_declared) == (3, 0)


@cuts
def test_o22_strides_are_packed_or_honoured(
    receiver: Receiving, cut: dict[str, Any]
) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent(receiver, {
        "transposed": base[:2, :3].t(), "every second": base[::2, 1::2],
        "stride 0": torch.tensor([1.0, 2.0]).expand(3, 2),
        "offset": base[1:, 2:], "long": torch.arange(20)[3::2],
        "permuted": torch.arange(24, dtype=torch.int16)
        .reshape(2, 3, 4).permute(2, 0, 1),
    }, **cut)


def test_o22_negative_strides_of_numpy(receiver: Receiving) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    class Reversed(Items):
        def __iter__(self) -> Any:
            yield "w", array[::-1, ::-2]

    want = {"w": torch.from_numpy(array[::-1, ::-2].copy())}
    with receiver.trains(Reversed(want)) as engine:
        engine.send_weights()
        receiver.holds(want)


@cuts
def test_every_dtype_of_torch_that_travels(
    receiver: Receiving, cut: dict[str, Any]
) -> None:
    """Those of eight bits of exponent and mantissa among them."""
    bits = torch.arange(48, dtype=torch.uint8)
    sent(receiver, {
        str(dtype).removeprefix("torch."): bits.view(dtype) for dtype in (
            torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16,
            torch.float16, torch.float32, torch.float64, torch.uint8,
            torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
            torch.uint64, torch.int64)
    } | {"bool": bits % 2 == 0}, **cut)


def test_what_asks_for_a_gradient_travels(receiver: Receiving) -> None:
    leaf = torch.arange(6.0).requires_grad_()
    with torch.inference_mode():
        inference = torch.arange(3.0)
    sent(receiver, {
        "leaf": leaf, "of a graph": (leaf * 2).reshape(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, 2).t()),
        "inference": inference, "buffer": torch.nn.Buffer(torch.ones(2)),
    })


# The rule: `nccl` appends, then flushes when the size is above the limit, as
# vLLM does; `ipc` flushes before what would not fit.
SIZES = {"a": 4, "b": 4, "c": 4, "d": 11, "e": 0, "f": 1}
IPC_CUTS = [["a", "b"], ["c"], ["d"], ["e", "f"]]


def of_sizes(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(size, dtype=torch.uint8) + len(name)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_o26_both_ends_cut_alike(receiver: Receiving, buffers: int) -> None:
    client = Bent(receiver.url)
    tensors = of_sizes(SIZES)
    with receiver.trains(
        Items(tensors), client, packed=True, packed_buffer_size_bytes=10,
        packed_num_buffers=buffers,
    ) as engine:
        engine.send_weights()
        receiver.holds(tensors)
    names = [update["names"] for update in client.updates]
    assert names == (IPC_CUTS if receiver.backend == "ipc" else [[*SIZES]])


def test_o27_a_tensor_above_the_limit_is_named_and_bounded(
    receiver: Receiving, capfd: pytest.CaptureFixture[str]
) -> None:
    tensors = of_sizes({"small": 15, "large": 100})
    stats = sent(receiver, tensors, packed=True, packed_buffer_size_bytes=16)
    said = capfd.readouterr().err
    warned = [line for line in said.splitlines() if "large" in line]
    assert len(warned) == 1 and "16" in warned[0], said
    assert "small" not in said
    # Two buffers of whole pages; with the ring of `ipc`, which has four slots
    # of 1 MiB whatever the limit is.
    more = (4 << 20) + (1 << 17) if receiver.backend == "ipc" else 8 * 4096
    assert 100 <= stats.peak_bytes <= 2 * (16 + 100) + more


def test_o30_host_memory_of_every_kind_on_every_path(
    receiver: Receiving, tmp_path: Path
) -> None:
    """4 KiB through buffers of 1 KiB; mapped, read-only, borrowed."""
    path = tmp_path / "values"
    values = np.arange(1024, dtype=np.float32)
    values.tofile(path)
    mapped = torch.from_file(str(path), size=1024)
    given = bytearray(values.tobytes())
    sent(receiver, {
        "heap": torch.from_numpy(values), "mapped": mapped,
        "borrowed": torch.frombuffer(given, dtype=torch.float32),
        "shared": torch.from_numpy(values.copy()).share_memory_(),
    }, packed=True, packed_buffer_size_bytes=1024)

    class Mapped(Items):
        def __iter__(self) -> Any:
            yield "w", np.memmap(path, np.float32, "r")

    want = {"w": torch.from_numpy(values)}
    with receiver.trains(Mapped(want), packed=True,
                         packed_buffer_size_bytes=1024) as engine:
        engine.send_weights()
        receiver.holds(want)


def test_o30_what_lies_elsewhere_is_refused_by_name(
    receiver: Receiving
) -> None:
    class Meta(Items):
        def __iter__(self) -> Any:
            for name, tensor in self.tensors.items():
                yield name, tensor.to("meta") if name == "b" else tensor

    tensors = {name: torch.ones(3) for name in "abc"}
    with receiver.trains(Meta(tensors)) as engine:
        with pytest.raises(NotSupportedError, match="parameter b: .*meta"):
            engine.send_weights()
        engine.source.__class__ = Items
        engine.send_weights()
        receiver.holds(tensors)


class Refilled(Items):
    """Yields one buffer again and again, which another thread fills anew.

    Host memory has no event: what is yielded is whole (B2), and its bytes may
    change as soon as the next one is asked for.
    """

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(256)
        for name, tensor in self.tensors.items():
            filled = threading.Event()

            def fill(value: torch.Tensor = tensor,
                     done: threading.Event = filled) -> None:
                room.copy_(value)
                done.set()

            threading.Timer(0.001, fill).start()
            assert filled.wait(10)
            yield name, room
        room.fill_(-1)


@pytest.mark.parametrize("limit", [1 << 10, 1 << 20])
@pytest.mark.parametrize("direct", [False, True])
def test_o31_a_buffer_that_is_filled_anew_for_each_item(
    receiver: Receiving, limit: int, direct: bool
) -> None:
    info = {"path": "cma"} if direct and receiver.backend == "ipc" else {}
    tensors = {f"w{i}": torch.full((256,), float(i)) for i in range(12)}
    with receiver.trains(
        Refilled(tensors), packed=not direct, packed_buffer_size_bytes=limit,
        **info,
    ) as engine:
        for _ in range(5):
            engine.send_weights()
            receiver.holds(tensors)


@pytest.mark.parametrize(("spelled", "known"), [
    (torch.bfloat16, True), ("bfloat16", True), ("torch.bfloat16", True),
    ("BFLOAT16", True), ("bf16", True), ("float13", False), ("", False),
    (None, False),
])
def test_o28_spellings_of_a_dtype(
    receiver: Receiving, spelled: Any, known: bool
) -> None:
    """The library's answers: aliases are taken, others told with what is
    known."""
    class Spelled(Items):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("w", spelled, (3,))]

    client = Bent(receiver.url)
    tensors = {"w": torch.tensor([1, 2, 3], dtype=torch.bfloat16)}
    with receiver.trains(Spelled(tensors), client) as engine:
        if known:
            engine.send_weights()
            receiver.holds(tensors)
            assert client.updates[0]["dtype_names"] == ["bfloat16"]
        else:
            with pytest.raises((ValueError, NotSupportedError)) as refused:
                engine.send_weights()
            said = str(refused.value)
            assert "parameter w" in said and "bfloat16" in said, said
            assert "update" not in client.calls


def test_o28_another_known_dtype_is_a_mismatch_of_both(
    receiver: Receiving
) -> None:
    class Spelled(Items):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("w", "float8_e4m3fn", (3,))]

    tensors = {"w": torch.tensor([1, 2, 3], dtype=torch.bfloat16)}
    with receiver.trains(Spelled(tensors)) as engine:
        with pytest.raises(
            MismatchError, match="w .*float8_e4m3fn, got bfloat16"
        ):
            engine.send_weights()
