# SPDX-License-Identifier: Apache-2.0
"""What a running server stores of what a torch trainer sent, by `ipc` and by
`nccl`: precision, order, what was left out, names, tied parameters (O-29,
O-32, O-34 to O-36, O-43, O-45, O-60). The bytes are predicted by NumPy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import checkpoints
import ferry_server
import models
import pytest
import torch
from cases import Items, predicted, training
from ferry.adapters import Filter, Rename
from ferry.errors import FerryError

# Buffers that hold one tensor, some, and all of them.
SIZES = (64, 30000, 1 << 30)
SMALL: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": 64}


def near(count: int) -> torch.Tensor:
    """Values that bf16 cannot tell apart, nor f16."""
    return 6.817 + torch.arange(count) * 1e-6


# ---- precision ----


def test_o29_what_is_kept_in_f32_is_never_narrowed(
    served: Any, folders: dict[int, Path]
) -> None:
    """One dtype a tensor: norms in f32 among matrices in bf16."""
    backend, server = served
    tensors = models.tensors(folders[2])
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = near(tensor.numel())
    with training(backend, server.url, Items(tensors)) as engine:
        engine.send_weights()
    assert len(set(near(64).tolist())) > 30
    assert server.checksums() == predicted(folders[2], tensors)
    narrow = {n: t.to(torch.bfloat16) for n, t in tensors.items()}
    assert predicted(folders[2], narrow) != predicted(folders[2], tensors)


def half_way(tensor: torch.Tensor) -> torch.Tensor:
    """In f32, between two values of bf16: a third of all at the middle."""
    bits = tensor.float().view(torch.int32)
    low = torch.arange(bits.numel(), dtype=torch.int32).reshape(bits.shape)
    return torch.where(low % 3 == 0, bits | 0x8000,
                       bits | (low * 7919 % 65536)).view(torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn"])
def test_o60_other_dtypes_are_converted_to_nearest_even(
    served: Any, folders: dict[int, Path], dtype: str
) -> None:
    backend, server = served
    tensors = {
        name: half_way(tensor).to(getattr(torch, dtype))
        for name, tensor in models.tensors(folders[3]).items()
    }
    if dtype == "float32":
        first = next(iter(tensors.values()))
        first[0, :2] = torch.tensor([1.00390625, 1.01171875])
        assert first[0, :2].bfloat16().tolist() == [1.0, 1.015625]
    with training(backend, server.url, Items(tensors)) as engine:
        engine.send_weights()
    assert server.checksums() == predicted(folders[3], tensors)


# ---- order ----


def shuffled(tensors: dict[str, Any], seed: int) -> dict[str, Any]:
    names = list(tensors)
    random.Random(seed).shuffle(names)
    return {name: tensors[name] for name in names}


def test_o34_loading_twice_in_any_pieces_is_loading_once(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    for seed, size in itertools.product((1, 2), SIZES):
        tensors = models.tensors(folders[seed])
        with training(backend, server.url, Items(tensors), packed=True,
                      packed_buffer_size_bytes=size) as engine:
            for _ in range(2):
                engine.send_weights()
                assert server.checksums() == models.digests(folders[seed])


@pytest.mark.parametrize("size", SIZES)
def test_o32_o34_parts_in_buffers_far_apart_stay_whole(
    served: Any, folders: dict[int, Path], size: int
) -> None:
    """Two buffers; q, k and v of a layer are in ones that are long reused."""
    backend, server = served
    source = Items(models.tensors(folders[1]))
    with training(backend, server.url, source, packed=True,
                  packed_buffer_size_bytes=size,
                  packed_num_buffers=2) as engine:
        for seed in (2, 3, 1, 2):
            source.tensors = shuffled(models.tensors(folders[seed]), seed)
            engine.send_weights()
            assert server.checksums() == models.digests(folders[seed])


@pytest.mark.parametrize("parts", [("q", "k", "v"), ("gate", "up")])
def test_o35_the_parts_of_a_weight_come_in_any_order(
    served: Any, folders: dict[int, Path], parts: tuple[str, ...]
) -> None:
    backend, server = served
    source = Items({})
    tensors = models.tensors(folders[2])
    with training(backend, server.url, source, **SMALL) as engine:
        for order in itertools.permutations(parts):
            def place(name: str, order: Any = order) -> int:
                return next((order.index(part) for part in parts
                             if f"{part}_proj" in name), -1)

            source.tensors = dict(
                sorted(tensors.items(), key=lambda item: place(item[0])))
            engine.send_weights()
            assert server.checksums() == models.digests(folders[2]), order
            source.tensors = models.tensors(folders[1])
            engine.send_weights()


# ---- what a round leaves out, and names ----


def test_o36_what_is_not_sent_keeps_its_bytes(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    with training(backend, server.url,
                  Items(models.tensors(folders[1]))) as engine:
        engine.send_weights()
    tensors = models.tensors(folders[2])
    part = Filter(Items(tensors), ["model.layers.0.", "model.norm."])
    want = predicted(folders[1], {
        n: t for n, t in tensors.items()
        if n.startswith(("model.layers.0.", "model.norm."))})
    with training(backend, server.url, part) as engine:
        for _ in range(3):
            engine.send_weights()
            assert server.checksums() == want
    before = server.generate([1, 2, 3], 4)["token_ids"]
    assert server.generate([1, 2, 3], 4)["token_ids"] == before


def test_o43_a_wrapper_s_names_are_mapped_or_told_with_the_nearest(
    served: Any, folders: dict[int, Path]
) -> None:
    backend, server = served
    tensors = models.tensors(folders[3])
    wrapped = Items({
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()})
    with training(backend, server.url, wrapped) as engine:
        with pytest.raises(FerryError) as refused:
            engine.send_weights()
    said = str(refused.value)
    assert "model.language_model.embed_tokens.weight" in said
    assert "nearest" in said or "did you mean" in said, said
    assert "model.embed_tokens.weight" in said.replace(
        "model.language_model.embed_tokens.weight", "")
    mapped = Rename(wrapped, {"model.language_model.": "model."})
    with training(backend, server.url, mapped) as engine:
        engine.send_weights()
    assert server.checksums() == models.digests(folders[3])


# ---- tied parameters ----

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tied(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterable[tuple[Path, ferry_server.Server]]:
    """A server whose model has one storage for embedding and head."""
    folder = tmp_path_factory.mktemp("tied")
    checkpoints.make(str(folder / "model"), arch="llama", variant="tied",
                     seed=4, dtype="BF16")
    with ferry_server.Server(
        folder, folder / "model", "--kernel-format", "bf16",
        "--tensor-parallel-size", "2",
    ) as server:
        yield folder / "model", server


def test_o45_one_storage_under_either_name_or_both(tied: Any) -> None:
    folder, server = tied
    plain = models.tensors(folder)[EMBED]
    ways: list[tuple[float, tuple[str, ...]]] = [
        (2.0, (EMBED,)), (3.0, (HEAD,)), (4.0, (EMBED, HEAD)),
        (5.0, (HEAD, EMBED)),
    ]
    for factor, names in ways:
        value = plain * factor
        with training("ipc", server.url,
                      Items(dict.fromkeys(names, value))) as engine:
            engine.send_weights()
        assert server.checksums() == predicted(folder, {EMBED: value}), names


def test_o45_two_values_under_tied_names_are_an_error_of_both(
    tied: Any
) -> None:
    folder, server = tied
    plain = models.tensors(folder)[EMBED]
    for names in ((EMBED, HEAD), (HEAD, EMBED)):
        unequal = Items({names[0]: plain, names[1]: plain + 1})
        with training("ipc", server.url, unequal) as engine:
            with pytest.raises(FerryError) as refused:
                engine.send_weights()
        assert EMBED in str(refused.value) and HEAD in str(refused.value)
    whole = Items(models.tensors(folder))
    with training("ipc", server.url, whole) as engine:
        engine.send_weights()
    assert server.checksums() == models.digests(folder)


def test_o45_a_tied_module_is_sent_once_and_reaches_both(tied: Any) -> None:
    from ferry.weight_transfer import ModuleSource

    folder, server = tied
    model = models.module(folder)
    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = model.get_submodule("model.embed_tokens").weight
    model.add_module("lm_head", head)
    with torch.no_grad():
        head.weight.mul_(0.5)
    with training("ipc", server.url, ModuleSource(model)) as engine:
        engine.send_weights()
    assert server.checksums() == predicted(
        folder, {EMBED: models.tensors(folder)[EMBED] * 0.5})
