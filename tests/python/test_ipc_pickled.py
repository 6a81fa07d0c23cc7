# SPDX-License-Identifier: Apache-2.0
"""C6: handles as torch's own pickle of them reach a worker that its operator
lets read them; anything else is refused, unread or unrun (O-48, O-51)."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ferry_server
import pytest
import torch
from ferry.errors import FerryError
from ferry.weight_transfer import HTTPVLLMWeightSyncClient

NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def allowing(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ferry_server.Server]:
    with ferry_server.Server(
        tmp_path_factory.mktemp("allowing"), folders[1],
        env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    ) as server:
        yield server


def arguments(
    shape: tuple[int, ...] = (64,), dtype: torch.dtype = torch.bfloat16,
    **change: Any,
) -> tuple[Any, ...]:
    """What torch's reduce_tensor gives for a CUDA tensor."""
    tensor = torch.empty(shape, device="meta", dtype=dtype)
    fields = {
        "cls": type(tensor), "size": tensor.size(), "stride": tensor.stride(),
        "offset": 0, "storage": torch.storage.TypedStorage,
        "dtype": tensor.dtype, "device": 0, "handle": bytes(range(64)),
        "storage_bytes": 1 << 21, "storage_offset": 4096,
        "requires_grad": False, "counter": b"c" * 64, "counter_offset": 8,
        "event": b"e" * 64, "sync": True, **change}
    return tuple(fields.values())


def update(handles: Any, **more: Any) -> dict[str, Any]:
    return {"names": [NAME], "dtype_names": ["bfloat16"], "shapes": [[64]],
            "ipc_handles": handles, **more}


def answer(server: Any, info: dict[str, Any]) -> str:
    """The worker's words; the round is over and the next one can start."""
    client = HTTPVLLMWeightSyncClient(server.url)
    client.init_weight_transfer_engine({"packed": False})
    client.start_weight_update()
    with pytest.raises(FerryError) as failed:
        client.update_weights(info)
    server.post("/ferry/abort_weight_update")
    return str(failed.value)


def raw(text: str) -> dict[str, Any]:
    info = update(None)
    del info["ipc_handles"]
    return {**info, "ipc_handles_pickled": text}


@pytest.mark.parametrize("handles", [
    [{"GPU-a1": arguments()}],
    {"GPU-a1": arguments()},
    [{"GPU-a1": arguments(), "GPU-b2": arguments(device=1)}],
    [{"GPU-a1": arguments(cls=torch.nn.Parameter)}],
    [{"GPU-a1": arguments(storage=torch.storage.UntypedStorage)}],
    [{"GPU-a1": arguments(storage_bytes=1 << 40, offset=300)}],
], ids=["list", "packed", "devices", "parameter", "untyped", "large"])
def test_c6_handles_as_torch_pickles_them_are_read(
    allowing: Any, handles: Any
) -> None:
    said = answer(allowing, update(handles))
    assert "need a CUDA device" in said and "GPU-a1" in said


@pytest.mark.parametrize("protocol", [4, 5])
def test_c6_many_handles_with_everything_shared_are_read(
    allowing: Any, protocol: int
) -> None:
    names = [f"model.layers.{i}.w" for i in range(3000)]
    handle = arguments()
    text = base64.b64encode(pickle.dumps(
        [{"GPU-a1": handle} for _ in names], protocol=protocol)).decode()
    said = answer(allowing, {
        "names": names, "dtype_names": ["bfloat16"] * 3000,
        "shapes": [[64]] * 3000, "ipc_handles_pickled": text})
    assert "need a CUDA device" in said


def test_o48_a_device_of_another_name_is_told_with_both(
    allowing: Any
) -> None:
    said = answer(allowing, update([{"MIG-abc": arguments()}]))
    assert "MIG-abc" in said and "host memory" in said


@pytest.mark.parametrize(("handles", "words"), [
    ([{"GPU-a1": arguments((63,))}], NAME),
    ([{"GPU-a1": arguments(dtype=torch.float32)}], NAME),
    ([{"GPU-a1": arguments()}] * 2, "a list or dict is used twice"),
    ([{"GPU-a1": arguments()}, {"GPU-a1": arguments()}], "got 2 and 1"),
    ([{"GPU-a1": arguments()[:14]}], "a tuple of 15"),
    ([{"GPU-a1": arguments(handle="text")}], "the handle must be bytes"),
    ([{"GPU-a1": arguments(device=None)}], "opcode 0x4e"),
    ([{"GPU-a1": arguments(cls=torch.Generator)}], "torch.Tensor"),
    ([{0: arguments()}], "a device's name"),
    ([{}], "a dict with a device's name"),
    ("text", "a list or a dict"),
    (1.5, "opcode 0x47"),
])
def test_c6_anything_else_is_refused_with_what_and_where(
    allowing: Any, handles: Any, words: str
) -> None:
    said = answer(allowing, update(handles))
    assert "ipc_handles_pickled" in said and words in said, said


def test_o51_a_pickle_that_calls_is_not_run(
    allowing: Any, tmp_path: Path
) -> None:
    target = tmp_path / "made-by-pickle"

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(target), "w"))

    for payload in (Evil(), [{"GPU-a1": Evil()}],
                    [{"GPU-a1": arguments(size=Evil())}]):
        said = answer(allowing, raw(
            base64.b64encode(pickle.dumps(payload)).decode()))
        assert "only torch.Size may be made" in said
    for protocol in (0, 1, 2, 3):
        said = answer(allowing, raw(base64.b64encode(
            pickle.dumps(Evil(), protocol=protocol)).decode()))
        assert "protocol" in said
    assert not target.exists()


@pytest.mark.parametrize(("text", "words"), [
    (base64.b64encode(pickle.dumps([{"g": arguments()}])).decode()[:-3],
     "base64"),
    ("bm90IGEgcGlja2xl", "begins with its protocol"),
    ("", "base64"),
    ("A" * (24 << 20), "at most"),
])
def test_o51_junk_is_refused(allowing: Any, text: str, words: str) -> None:
    assert words in answer(allowing, raw(text))


def test_o51_a_hundred_mebibytes_are_refused_and_forgotten(
    allowing: Any
) -> None:
    assert allowing.post("/start_weight_update").code == 200
    reply = allowing.post("/update_weights", {
        "update_info": raw("A" * (100 << 20))})
    assert reply.code in (400, 413), reply.text[:400]
    allowing.post("/ferry/abort_weight_update")
    assert "need a CUDA device" in answer(
        allowing, update([{"GPU-a1": arguments()}]))


def test_c6_both_forms_at_once_are_refused(allowing: Any) -> None:
    info = {**raw("gARdLg=="), "ipc_handles": []}
    reply = allowing.post("/start_weight_update")
    assert reply.code == 200
    reply = allowing.post("/update_weights", {"update_info": info})
    assert "Cannot specify both" in reply.text
    allowing.post("/ferry/abort_weight_update")


def test_c6_a_worker_that_does_not_allow_it_reads_nothing(
    server: Any
) -> None:
    said = answer(server, update([{"GPU-a1": arguments()}]))
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION=1" in said


def test_c6_the_client_writes_what_torch_would_read() -> None:
    """The same bytes as `pickle.dumps`, whose form the worker accepts."""
    from ferry.weight_transfer.clients import _payload_text

    handles = [{"GPU-a1": arguments()}]
    sent = json.loads(_payload_text(update(handles)))
    decoded = base64.b64decode(sent["ipc_handles_pickled"], validate=True)
    assert decoded == pickle.dumps(handles)
    assert pickle.loads(decoded) == handles
    assert "ipc_handles" not in sent
