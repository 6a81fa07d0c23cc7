# SPDX-License-Identifier: Apache-2.0
"""What vLLM's /weight_checker must answer, from the safetensors file alone.

vLLM keeps a bfloat16 Llama's parameters as they are on a CPU: q, k and v
rows in one parameter, gate and up in one, each rank its slice, and key and
value heads repeated where there are fewer than ranks.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))

import stored  # noqa: E402
from model_files import open_model  # noqa: E402


def predicted(folder: Path, tp: int) -> dict[str, str]:
    """Returns the SHA-256 of each parameter of each rank, by vLLM's key."""
    model = open_model(str(folder))
    return {
        f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(
            stored.encode(values, "bf16")
        ).hexdigest()
        for rank in range(tp)
        for name, values in stored.Shard(model, tp, rank, "bf16").values()
    }
