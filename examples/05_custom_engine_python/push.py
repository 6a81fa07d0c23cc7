# SPDX-License-Identifier: Apache-2.0
"""One round through an engine of one's own, chosen by name on both sides.

python -m ferry.serve MODEL_DIR --engine file=file_worker:FileEngine \
        --weight-transfer-config '{"backend": "file"}'
python push.py MODEL_DIR http://127.0.0.1:8000 /tmp/weights.bin
"""

from __future__ import annotations

import sys

from ferry.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from file_trainer import FileTrainerInitInfo
from safetensors.torch import load_file


class Checkpoint(WeightSource):
    """A checkpoint's tensors as a source."""

    def __init__(self, folder: str) -> None:
        self.tensors = load_file(f"{folder}/model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        """Declare every tensor."""
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    def __iter__(self):
        """Yield every tensor."""
        return iter(self.tensors.items())


def main() -> None:
    """Register the engine by module and class, and send."""
    folder, url, path = sys.argv[1:]
    WeightTransferTrainerFactory.register_engine(
        "file", "file_trainer", "FileTrainerEngine")
    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=FileTrainerInitInfo(path, rank=0),
        client=HTTPVLLMWeightSyncClient(url),
        source=Checkpoint(folder),
    )
    engine.send_weights()
    engine.shutdown()
    print("sent")


if __name__ == "__main__":
    main()
