# SPDX-License-Identifier: Apache-2.0
"""The reload functions at vLLM's own import path."""

from __future__ import annotations

from ferry.weight_transfer.reload import (
    finalize_layerwise_processing,
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

__all__ = [
    "finalize_layerwise_processing",
    "finalize_layerwise_reload",
    "initialize_layerwise_reload",
    "record_metadata_for_reloading",
]
