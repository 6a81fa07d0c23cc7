# SPDX-License-Identifier: Apache-2.0
"""Items cross into the library in runs: what is described in C is what Python
would have described, errors keep their place, and memory its bound."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ferry import _ffi_source
from ferry._ffi import Failures, ffi, lib, text
from ferry._ffi_module import ModuleTree
from ferry._ffi_source import Source
from ferry.errors import MismatchError
from ferry.source import (
    BATCH_ITEMS,
    ModuleSource,
    ParamMeta,
    WeightSource,
    adapt,
)
from ferry.tensor import view

PLAIN = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "parameter": torch.nn.Parameter(torch.ones(3, 2).t()),
    "every second": torch.arange(10)[::2],
    "spread": torch.ones(1, 4).expand(3, 4),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "offset": torch.arange(9, dtype=torch.int16)[4:],
    **{str(dtype): torch.zeros(3, dtype=dtype) for dtype in (
        torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.int64, torch.int32, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool)},
}


class Held(WeightSource):
    """Yields what it holds, as it is told to."""

    def __init__(self, tensors: dict[str, Any], stable: bool = False) -> None:
        self.tensors = tensors
        self.stable = stable

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape))
                for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Driven:
    """A source as the library drives it."""

    def __init__(self, inner: Any) -> None:
        self.failures = Failures()
        self.source = Source(adapt(inner), self.failures)
        self.ops, self.self = self.source.c.ops, self.source.c.self
        self.item = ffi.new("ferry_item *")
        self.declared()

    def declared(self) -> list[tuple[Any, ...]]:
        """Reads the metadata: name, dtype and shape of each."""
        params, count = ffi.new("ferry_param_meta **"), ffi.new("size_t *")
        code = self.ops.metadata(self.self, params, count)
        if code < 0:
            self.failures.throw(code)
        return [(text(p.name), p.dtype, [p.shape[d] for d in range(p.ndim)])
                for p in params[0][0 : count[0]]]

    def __iter__(self) -> Iterator[Any]:
        assert self.ops.begin(self.self) == 0
        while (code := self.ops.next(self.self, self.item)) == 0:
            yield self.item
        self.ops.end(self.self)
        if code < 0:
            self.failures.throw(code)


@pytest.mark.parametrize("stable", [False, True])
def test_a_plain_tensor_is_described_as_python_does(stable: bool) -> None:
    names = iter(PLAIN)
    for item in Driven(Held(PLAIN, stable)):
        name = next(names)
        want, got = view(name, PLAIN[name]), item.tensor
        shape = [got.shape[d] for d in range(got.ndim)]
        stride = [got.stride[d] for d in range(got.ndim)]
        assert text(item.name) == name and got.dtype == want.dtype, name
        assert shape == list(want.shape), name
        if 0 not in shape:
            assert int(ffi.cast("uintptr_t", got.data)) == want.address, name
            assert all(a == b for a, b, n in zip(stride, want.strides, shape)
                       if n > 1), name
    assert next(names, None) is None


def test_plain_tensors_need_no_look_from_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no table of DLPack functions")
    monkeypatch.setattr(_ffi_source, "fill_tensor", None)
    assert len(list(Driven(Held(PLAIN, True)))) == len(PLAIN)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(torch.ones(3, device="meta"), "meta"),
     (torch.ones(3).to_sparse(), "layout"),
     (torch.eye(3).to_mkldnn(), "layout"),
     (torch.ones(2, dtype=torch.complex64), "complex64"),
     (torch.zeros([1] * 9), "9 dimensions")])
def test_what_is_not_plain_is_refused_by_name_in_its_place(
    tensor: Any, words: str
) -> None:
    source = Held({"a": torch.ones(1), "b": torch.ones(1)}, stable=True)
    driven = Driven(source)
    source.tensors = {**source.tensors, "bad one": tensor, "c": torch.ones(1)}
    came = []
    with pytest.raises((NotImplementedError, ValueError),
                       match=f"bad one.*{words}"):
        for item in driven:
            came.append(text(item.name))
    assert came == ["a", "b"]


def test_a_lazy_minus_sign_is_resolved() -> None:
    tensor = torch.complex(torch.ones(2), torch.full((2,), 3.0)).conj().imag
    assert tensor.is_neg()
    for item in Driven(Held({"a": tensor})):
        raw = ffi.buffer(item.tensor.data, 4)
        assert torch.frombuffer(raw, dtype=torch.float32).item() == -3.0


def test_what_a_stable_source_raises_comes_after_its_items() -> None:
    class Failing(Held):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for index, pair in enumerate(self.tensors.items()):
                if index == 20:
                    raise LookupError("shard 20 is gone")
                yield pair

    tensors = {str(i): torch.ones(1) for i in range(40)}
    came = []
    with pytest.raises(LookupError, match="shard 20"):
        for item in Driven(Failing(tensors, stable=True)):
            came.append(text(item.name))
    assert came == list(tensors)[:20]


class Groups(Held):
    """Makes a group anew when its turn comes, and counts what is alive."""

    def __init__(self, n_groups: int, size: int) -> None:
        super().__init__({
            f"layers.{g}.experts.{i}.w": torch.zeros(1)
            for g in range(n_groups) for i in range(size)})
        self.resumed = self.most = 0
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        for group in self.groups():
            self.resumed += 1
            made = [torch.zeros(1) for _ in group]
            self.alive.update(made)
            self.most = max(self.most, len(self.alive))
            yield group, made
            del made


def test_b10_37000_names_are_about_a_hundred_resumptions() -> None:
    source = Groups(94, 394)
    count = sum(1 for _ in Driven(source))
    assert count == 94 * 394 == 37036
    assert source.resumed == 94


def test_one_group_is_in_memory_at_a_time() -> None:
    source = Groups(5, BATCH_ITEMS + 3)
    gc.collect()
    assert sum(1 for _ in Driven(source)) == 5 * (BATCH_ITEMS + 3)
    assert source.most == BATCH_ITEMS + 3


def test_a_group_of_unequal_lists_is_an_error() -> None:
    class Short(Groups):
        def iter_groups(self) -> Any:
            yield ["a", "b"], [torch.ones(1)]

    with pytest.raises(MismatchError, match="2 names with 1 tensors"):
        list(Driven(Short(1, 2)))


def test_a_module_s_parameters_are_listed_as_torch_lists_them() -> None:
    class Override(torch.nn.Linear):
        def named_parameters(self, *args: Any, **more: Any) -> Any:
            yield "other", self.weight

    shared, tied = torch.nn.Linear(2, 2), torch.nn.Embedding(3, 2)
    head = torch.nn.Linear(2, 3, bias=False)
    head.weight = tied.weight
    plain = torch.nn.ModuleDict({
        "tied": tied, "one": shared, "two": shared, "head": head,
        "deep": torch.nn.Sequential(torch.nn.LayerNorm(2), torch.nn.ReLU(),
                                    torch.nn.Linear(2, 1)),
        "norm": torch.nn.BatchNorm1d(2)})
    plain.register_parameter("last", None)
    plain.register_module("nothing", None)
    for module in (plain, Override(2, 2),
                   torch.nn.Sequential(Override(2, 2), plain)):
        want = list(module.named_parameters())
        got = list(ModuleSource(module))
        assert [n for n, _ in got] == [n for n, _ in want]
        assert all(a is b for (_, a), (_, b) in zip(got, want))
    # Every pass is a fresh look.
    source = ModuleSource(plain)
    list(source)
    shared.extra = torch.nn.Parameter(torch.ones(1))
    plain["head"].weight = torch.nn.Parameter(torch.zeros(3, 2))
    names = [n for n, _ in source]
    assert "one.extra" in names and "head.weight" in names


class Square(torch.nn.Module):
    """Two layers and one that both share, each of 3 by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), self.one)


class Renamed(Square):
    """A class that tells other names of its parameters."""

    def named_parameters(self, *args: Any, **more: Any) -> Any:
        return [("other", self.one.weight)]


class Special(torch.nn.Parameter):
    """A type that is not looked into by C."""


def set_data(data: Any) -> Any:
    def change(m: Any) -> None:
        m.one.weight.data = data
    return change


def swap(m: Any) -> None:
    torch.utils.swap_tensors(m.one.weight, Special(torch.ones(3, 3)))


def reorder(m: Any) -> None:
    m.one._parameters["weight"] = m.one._parameters.pop("weight")


def rename(m: Any, of: str) -> None:
    setattr(m, of, {f"{k}_": v for k, v in getattr(m, of).items()})


CHANGES: dict[str, Any] = {
    "nothing": lambda m: None,
    "values": lambda m: m.one.weight.data.fill_(7),
    "storage": set_data(torch.ones(3, 3)),
    "shape": set_data(torch.ones(3, 2)),
    "dimensions": set_data(torch.ones(3)),
    "strides": set_data(torch.ones(3, 3).t()),
    "offset": set_data(torch.ones(4, 3)[1:]),
    "dtype": lambda m: m.double(),
    "dtype of one": lambda m: m.two.half(),
    "parameter": lambda m: setattr(
        m.two, "bias", torch.nn.Parameter(torch.ones(3))),
    "type": swap,
    "one less": lambda m: setattr(m.one, "bias", None),
    "one deleted": lambda m: delattr(m.one, "bias"),
    "one more": lambda m: m.two.register_parameter(
        "extra", torch.nn.Parameter(torch.ones(1))),
    "order": reorder,
    "name": lambda m: rename(m.one, "_parameters"),
    "name of a module": lambda m: rename(m, "_modules"),
    "tied": lambda m: setattr(m.two, "weight", m.one.weight),
    "module": lambda m: setattr(m, "two", torch.nn.Linear(3, 3)),
    "module below": lambda m: m.inner.__setitem__(0, torch.nn.Linear(3, 1)),
    "module met twice": lambda m: m.inner.__setitem__(
        1, torch.nn.Linear(3, 3)),
    "module more": lambda m: m.inner.append(torch.nn.Linear(1, 1)),
    "module less": lambda m: delattr(m, "one"),
    "modules swapped": lambda m: m._modules.update(one=m.two, two=m.one),
    "no modules": lambda m: m._modules.clear(),
    "other dict": lambda m: setattr(m.one, "_parameters", {}),
    "class": lambda m: setattr(m, "__class__", Renamed),
}


def stated(module: Any) -> list[tuple[Any, ...]]:
    """What a round must state of a module, as torch tells it."""
    return [(name, *view(name, p)[1:3], p.stride(), p.data_ptr())
            for name, p in module.named_parameters()]


def sent(driven: Driven) -> list[tuple[Any, ...]]:
    """What a round states: declared and yielded, which must agree."""
    declared = driven.declared()
    items = []
    for item in driven:
        got = item.tensor
        items.append((
            text(item.name), got.dtype,
            torch.Size(got.shape[d] for d in range(got.ndim)),
            tuple(got.stride[d] for d in range(got.ndim)),
            int(ffi.cast("uintptr_t", got.data))))
    assert declared == [(n, t, list(s)) for n, t, s, _, _ in items]
    return items


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("what", CHANGES)
def test_b1_what_changed_in_a_module_is_in_the_next_round(
    what: str, rounds: int
) -> None:
    module = Square()
    driven = Driven(ModuleSource(module))
    for _ in range(rounds):
        before = sent(driven)
        assert before == stated(module)
    CHANGES[what](module)
    assert sent(driven) == stated(module)
    assert (stated(module) == before) == (what in ("nothing", "values"))
    assert sent(driven) == stated(module)


@pytest.mark.parametrize("what", CHANGES)
def test_b3_what_changed_after_the_metadata_is_in_the_pass(what: str) -> None:
    module = Square()
    driven = Driven(ModuleSource(module))
    for _ in range(3):
        driven.declared()
    CHANGES[what](module)
    got = [(text(i.name), int(ffi.cast("uintptr_t", i.tensor.data)))
           for i in driven]
    assert got == [(n, p.data_ptr()) for n, p in module.named_parameters()]


def test_a_module_moved_elsewhere_is_refused_by_name() -> None:
    module = Square()
    driven = Driven(ModuleSource(module))
    for _ in range(3):
        sent(driven)
    module.to("meta")
    driven.declared()
    with pytest.raises(NotImplementedError, match="one.weight.*meta"):
        list(driven)


def test_a_parameter_that_becomes_a_sharded_one_is_gathered() -> None:
    class Sharded(torch.nn.Parameter):
        def detach(self) -> Any:
            return self

        def full_tensor(self) -> Any:
            return torch.full((3, 3), 5.0)

    module = Square()
    driven = Driven(ModuleSource(module))
    for _ in range(3):
        sent(driven)
    torch.utils.swap_tensors(module.one.weight, Sharded(torch.ones(3, 3)))
    driven.declared()
    first = next(iter(driven)).tensor
    assert ffi.cast("float *", first.data)[8] == 5.0


def test_of_a_module_that_is_as_it_was_python_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no table of DLPack functions")
    module = Square()
    driven = Driven(ModuleSource(module))
    monkeypatch.setattr(ModuleTree, "_walk", None)
    monkeypatch.setattr(ModuleSource, "metadata", None)
    monkeypatch.setattr(_ffi_source, "fill_tensor", None)
    for _ in range(3):
        module.one.weight.data = torch.ones(3, 3)
        assert sent(driven) == stated(module)


def test_nothing_of_a_module_is_kept_alive_between_rounds() -> None:
    module = Square()
    driven = Driven(ModuleSource(module))
    sent(driven)
    gone = [weakref.ref(module.two.weight), weakref.ref(module.inner[0])]
    module.two.weight = torch.nn.Parameter(torch.ones(3, 3))
    module.inner[0] = torch.nn.Linear(3, 3)
    gc.collect()
    assert [g() for g in gone] == [None, None]
    assert sent(driven) == stated(module)


def test_a_module_s_source_can_be_pickled() -> None:
    source = ModuleSource(Square())
    again = pickle.loads(pickle.dumps(source))
    assert [n for n, _ in again] == [n for n, _ in source]
    assert again.metadata() == source.metadata()


def test_next_without_a_pass_is_an_error() -> None:
    driven = Driven(Held({"a": torch.ones(1)}))
    assert driven.ops.next(driven.self, driven.item) < 0
    assert lib.FERRY_PY_BATCH_ITEMS == BATCH_ITEMS
