# SPDX-License-Identifier: Apache-2.0
"""What users get wrong is said in words, at once, and the next round works
(B1 to B3; O-28): sources, clients, tensors that are none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ferry_server
import numpy as np
import pytest
import torch
from cases import Items, Receiving
from ferry.errors import (
    ArgumentError,
    FerryError,
    NotSupportedError,
    OrderError,
)
from ferry.weight_transfer import (
    FanoutWeightSyncClient,
    HTTPVLLMWeightSyncClient,
    ParamMeta,
)

GOOD = {"w": torch.ones(2)}
NOBODY = "http://127.0.0.1:1"


class Odd(Items):
    """Declares and yields what it is told to."""

    declares: Any = None
    yields: Any = None

    def metadata(self) -> Any:
        if self.declares is not None:
            return self.declares
        return super().metadata()

    def __iter__(self) -> Iterator[Any]:
        if self.yields is None:
            return iter(self.tensors.items())
        return iter(self.yields())


def refused(receiver: Receiving, **odd: Any) -> BaseException:
    """What a round of such a source raises; the next one works."""
    source = Odd(GOOD)
    with receiver.trains(source) as engine:
        vars(source).update(odd)
        began = time.monotonic()
        with pytest.raises(BaseException) as failed:  # noqa: PT011
            engine.send_weights()
        assert time.monotonic() - began < 5
        vars(source).update(declares=None, yields=None)
        engine.send_weights()
        receiver.holds(GOOD)
    return failed.value


@pytest.mark.parametrize(("declares", "words"), [
    ([("w", torch.float32, (2,))], "metadata entry 0: bad name"),
    ([ParamMeta(3, torch.float32, (2,))], "metadata entry 0: bad name 3"),
    ([ParamMeta("w", torch.float32, (2.5,))], "parameter w: .*integers"),
    ([ParamMeta("w", torch.float32, (1 << 70,))], "parameter w: .*64 bits"),
    ([ParamMeta("w", torch.float32, (-1,))], "parameter w: .*-1"),
    ([ParamMeta("w", torch.float32, (1 << 62, 8))], "parameter w: .*large"),
    ([ParamMeta("w", torch.float32, (1,) * 9)], "parameter w: .*at most 8"),
    ([ParamMeta("w", 7, (2,))], "parameter w: dtype 7"),
    ([ParamMeta("w", torch.float32, (2,))] * 2, "parameter w: named twice"),
])
def test_b1_metadata_that_will_not_do(
    receiver: Receiving, declares: Any, words: str
) -> None:
    error = refused(receiver, declares=declares)
    with pytest.raises(Exception, match=words):
        raise error
    assert isinstance(error, (ValueError, RuntimeError))


@pytest.mark.parametrize(("item", "words"), [
    ((3, torch.ones(2)), "item 0 of the source: .*int for the name"),
    (torch.ones(2), "item 0 of the source: .*Tensor for the name"),
    (("w", [1.0, 2.0]), "parameter w: .*got list"),
    (("w", memoryview(b"ab")), "parameter w: .*got memoryview"),
    (("w", np.ones(2, np.longdouble)), "parameter w: dtype float128"),
    (("w%s%n", torch.ones(2)), "w%s%n"),
    (lambda: ("w", torch.nested.nested_tensor([torch.ones(2)] * 2)),
     "parameter w: is a nested tensor"),
    (lambda: ("w", torch.quantize_per_tensor(
        torch.ones(2), 0.1, 0, torch.qint8)),
     "parameter w: is a quantized tensor"),
])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_b2_items_that_are_none(
    receiver: Receiving, item: Any, words: str
) -> None:
    error = refused(
        receiver, yields=lambda: [item() if callable(item) else item])
    with pytest.raises((ArgumentError, NotSupportedError, RuntimeError),
                       match=words):
        raise error


class Wordless(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise LookupError("not even that")


@pytest.mark.parametrize("error", [
    ValueError("one line\nand another\0 %s %n " + "\u00e9" * 3000),
    Wordless(), SystemExit(3), StopAsyncIteration(),
])
def test_what_a_source_raises_comes_back_as_itself_whatever_it_says(
    receiver: Receiving, error: BaseException
) -> None:
    def broken() -> Iterator[Any]:
        raise error
        yield

    assert refused(receiver, yields=broken) is error


def test_a_closed_client_says_so() -> None:
    clients: list[Any] = [
        HTTPVLLMWeightSyncClient(NOBODY),
        FanoutWeightSyncClient([HTTPVLLMWeightSyncClient(NOBODY)])]
    for client in clients:
        client.close()
        client.close()
        client.cancel()
        for call in (client.start_weight_update, client.status, client.peers,
                     client.world_size, client.abort_weight_update):
            with pytest.raises(OrderError, match="closed"):
                call()


@pytest.mark.parametrize("seconds", [None, float("inf"), float("nan"), "5"])
def test_a_bound_is_a_number_of_seconds(seconds: Any) -> None:
    for name in ("timeout", "connect_timeout"):
        with pytest.raises(ArgumentError, match=name):
            HTTPVLLMWeightSyncClient(NOBODY, **{name: seconds})


def test_a_label_is_text(receiver: Receiving) -> None:
    with receiver.trains(Items(GOOD)) as engine:
        for label in (7, "a\0b"):
            with pytest.raises(ArgumentError):
                engine.send_weights(weight_version=label)
        engine.send_weights(weight_version="\u03a9")
        receiver.holds(GOOD)


def test_o28_a_dtype_travels_by_its_name(receiver: Receiving) -> None:
    """A framework's own type in a message is what JSON cannot hold."""
    client = HTTPVLLMWeightSyncClient(receiver.url)
    info = {"names": ["a", "b", "c"], "shapes": [torch.Size([2])] * 3,
            "dtype_names": [torch.bfloat16, np.dtype("float32"), np.float16]}
    client.start_weight_update()
    with pytest.raises(FerryError, match="update_weights"):
        client.update_weights(info)  # which has no trainer behind it
    asked = ferry_server.http(receiver.url + "/asked").json["update_weights"]
    assert asked == {"update_info": {
        "names": ["a", "b", "c"], "shapes": [[2]] * 3,
        "dtype_names": ["bfloat16", "float32", "float16"]}}
    with pytest.raises(ArgumentError, match="object .*cannot travel"):
        client.update_weights({"names": [object()]})
