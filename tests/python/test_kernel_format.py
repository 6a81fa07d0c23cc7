# SPDX-License-Identifier: Apache-2.0
"""What the plugin does in vLLM with rounds in kernel format, over modules of
torch (E6); tests/vllm has the same over vLLM itself."""

from __future__ import annotations

import pytest
import torch
from ferry.errors import MismatchError, UnknownNameError
from ferry.vllm import kernel


@pytest.fixture
def model() -> torch.nn.Module:
    made = torch.nn.Module()
    made.embed = torch.nn.Linear(4, 3, bias=False)
    made.norm = torch.nn.LayerNorm(4)
    made.head = made.embed
    return made


def test_e6_parameters_are_copied_in_place(model: torch.nn.Module) -> None:
    address = model.norm.weight.data_ptr()
    weights = [("norm.weight", torch.full((4,), 7.0)),
               ("norm.bias", torch.full((4,), 8.0))]
    covered = kernel.check(model, weights)
    assert (covered.untouched, covered.partial) == (["embed.weight"], [])
    assert model.norm.weight.tolist() == [1] * 4
    kernel.place(model, weights)
    assert model.norm.weight.tolist() == [7] * 4
    assert model.norm.bias.tolist() == [8] * 4
    assert model.norm.weight.data_ptr() == address
    assert model.norm.weight.requires_grad


def test_e6_the_first_that_does_not_fit_is_named(
    model: torch.nn.Module
) -> None:
    fits = ("norm.weight", torch.zeros(4))
    for name, tensor, words in (
        ("norm.wait", torch.zeros(4), "none of this name; the nearest is "
                                      "norm.weight"),
        ("norm.bias", torch.zeros(4, 1), r"float32 \(4,\), got float32 "
                                         r"\(4, 1\)"),
        ("norm.bias", torch.zeros(4).half(), r"got float16 \(4,\)"),
    ):
        with pytest.raises((MismatchError, UnknownNameError),
                           match=f"parameter {name}: .*{words}"):
            kernel.check(model, [fits, (name, tensor), ("x", tensor)])


def test_o45_two_names_of_one_parameter_bring_the_same_bytes(
    model: torch.nn.Module
) -> None:
    bits = torch.full((3, 4), float("nan"))  # equal bytes, unequal numbers
    weights = [("embed.weight", bits), ("head.weight", bits.clone())]
    covered = kernel.check(model, weights)
    assert covered.untouched == ["norm.weight", "norm.bias"]
    kernel.place(model, weights)
    assert model.head.weight.isnan().all()
    weights[1][1][2, 3] = 1
    with pytest.raises(MismatchError, match="embed.weight and head.weight"):
        kernel.check(model, weights)
