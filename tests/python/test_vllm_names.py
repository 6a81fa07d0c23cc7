# SPDX-License-Identifier: Apache-2.0
"""The names and signatures of the installed vLLM, against ours (F5), and its
own clients and sources in our engines. Skipped where vLLM is not installed."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import models
import pytest

vllm = pytest.importorskip("vllm.distributed.weight_transfer",
                           reason="vLLM is not installed")

import ferry.weight_transfer as ours

MODULES = ("", ".base", ".clients", ".factory", ".nccl_engine", ".ipc_engine")
# Worker engines that load into vLLM's modules: in vLLM itself they are used,
# and `ferry serve` has its own.
ELSEWHERE = {
    "IPCWeightTransferEngine", "IPCWeightTransferInitInfo",
    "IPCWeightTransferUpdateInfo", "NCCLWeightTransferEngine",
    "NCCLWeightTransferInitInfo", "NCCLWeightTransferUpdateInfo",
}
# What the engines take besides: made by trainer_init, never by callers.
MADE_INSIDE = {
    "IPCTrainerWeightTransferEngine", "NCCLTrainerWeightTransferEngine",
}


def public(module: Any) -> dict[str, Any]:
    names = getattr(module, "__all__", None)
    found = {
        name: value for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (name in names if names else value.__module__ == module.__name__)
    }
    return {n: v for n, v in found.items() if n not in ELSEWHERE}


def check_call(what: str, theirs: Any, mine: Any) -> None:
    """Whatever can be passed to theirs can be passed to mine."""
    have = inspect.signature(mine).parameters
    order = [p.name for p in inspect.signature(theirs).parameters.values()
             if p.kind is p.POSITIONAL_OR_KEYWORD]
    positional = [p.name for p in have.values()
                  if p.kind is p.POSITIONAL_OR_KEYWORD]
    if order and order != ["names"]:
        assert positional[: len(order)] == order, what
    for name, parameter in inspect.signature(theirs).parameters.items():
        if name == "names" and "metadata" in have:
            continue  # layerwise_groups takes names too
        assert name in have, f"{what}: {name}"
        if parameter.default is not parameter.empty and \
                isinstance(parameter.default, (int, str, type(None))):
            assert have[name].default == parameter.default, f"{what}: {name}"
    for name, parameter in have.items():
        if name not in inspect.signature(theirs).parameters:
            assert parameter.default is not parameter.empty or \
                name == "metadata", f"{what} demands {name}"


@pytest.mark.parametrize("path", MODULES)
def test_f5_every_public_name_is_there(path: str) -> None:
    theirs = importlib.import_module("vllm.distributed.weight_transfer" + path)
    mine = importlib.import_module("ferry.weight_transfer" + path)
    names = public(theirs)
    assert names
    for name, value in names.items():
        assert hasattr(mine, name), f"{path}: {name}"
        own = getattr(mine, name)
        if inspect.isfunction(value):
            check_call(name, value, own)
            continue
        if name not in MADE_INSIDE:
            check_call(name, value, own)
        for method, function in vars(value).items():
            if method.startswith("_") or not callable(
                getattr(value, method)
            ):
                continue
            assert hasattr(own, method), f"{name}.{method}"
            if method != "metadata":  # ours can be read and called
                check_call(f"{name}.{method}", getattr(value, method),
                           getattr(own, method))


def test_objects_mix(server: Any, folders: dict[int, Path]) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCTrainerInitInfo,
    )

    model = models.module(folders[2])
    for client, source, info in (
        (vllm.HTTPVLLMWeightSyncClient(server.url), vllm.ModuleSource(model),
         IPCTrainerInitInfo(rank=0)),
        (vllm.HTTPVLLMWeightSyncClient(server.url), ours.ModuleSource(model),
         ours.IPCTrainerInitInfo(rank=0)),
        (ours.HTTPVLLMWeightSyncClient(server.url), vllm.ModuleSource(model),
         ours.IPCTrainerInitInfo(rank=0)),
    ):
        assert isinstance(client, ours.VLLMWeightSyncClient)
        assert isinstance(client, vllm.VLLMWeightSyncClient)
        engine = ours.WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=source)
        engine.send_weights()
        engine.shutdown()
        assert server.checksums() == models.digests(folders[2])
