# SPDX-License-Identifier: Apache-2.0
"""What a round would write of a model of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Coverage"]


@dataclass
class Coverage:
    """What a round would write, by layer or by parameter.

    Attributes
    ----------
    untouched : list of str
        Layers of which nothing came; they keep their weights.
    partial : list of str
        Layers of which a part came; vLLM would fill the rest with garbage.
    known : bool
        False: this vLLM does not tell.
    unit : str
        What the names are of: "layers", or "parameters" in kernel format.
    """

    untouched: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    known: bool = True
    unit: str = "layers"
