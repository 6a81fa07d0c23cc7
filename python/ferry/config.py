# SPDX-License-Identifier: Apache-2.0
"""Configuration of a worker's weight transfer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WeightTransferConfig"]


@dataclass
class WeightTransferConfig:
    """How a worker receives weights.

    Parameters
    ----------
    backend : str
        A name in `WeightTransferEngineFactory`; looked up when the engine is
        made.
    """

    backend: str = "nccl"
