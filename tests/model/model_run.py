# SPDX-License-Identifier: Apache-2.0
"""Run model_driver_main, and keep one checkpoint of each kind, for tests."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "reference"))

import checkpoints  # noqa: E402
from llama import Llama  # noqa: E402
from model_files import open_model  # noqa: E402

DRIVER = os.path.join(
    os.environ.get("FERRY_BUILD_DIR", os.path.join(HERE, "..", "..", "build")),
    "tests",
    "model_driver_main",
)


@functools.cache
def folder() -> str:
    """Return a temporary folder that goes away with this process."""
    path = tempfile.mkdtemp(prefix="ferry-model-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def checkpoint(
    arch: str, variant: str, dtype: str = "F32", gguf: str | None = None
) -> str:
    """Return the path of a tiny checkpoint, or of its GGUF."""
    name = f"{arch}-{variant}-{dtype}-{gguf}"
    path = os.path.join(folder(), name)
    checkpoints.make(path, arch, variant, seed=7, dtype=dtype, gguf=gguf)
    return os.path.join(path, "model.gguf") if gguf else path


@functools.cache
def reference(path: str) -> Llama:
    """Return the NumPy model of a checkpoint."""
    return Llama(open_model(path))


def drive(
    path: str, prompts: list[list[int]], *flags: object, fails: bool = False
) -> Any:
    """Run the driver; return its JSON, or its error text if it must fail."""
    command = [DRIVER, path, *map(str, flags)]
    for ids in prompts:
        command += ["--ids", ",".join(map(str, ids))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False
    )
    if fails:
        assert done.returncode != 0
        return done.stderr
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if prompts else None
