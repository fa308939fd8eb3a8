"""The weights of a model as they are stored: safetensors, quantised safetensors, or GGUF. One way to read them all.

Owns the choice of the reader. What comes out are names as in a Hugging Face checkpoint, and for each a tensor or a
QuantizedWeight. Called by `model_loader.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from quire.config import ModelFacts
from quire.config.quantization import declared_quantization
from quire.errors import ModelError
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

Weight: TypeAlias = Tensor | QuantizedWeight | StoredWeight


class Checkpoint(Protocol):
    """`num_bytes` is for a progress bar."""

    @property
    def num_bytes(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Name and weight; use each before asking for the next. What nobody looks at is not read."""
        ...


def open_checkpoint(facts: ModelFacts, dtype: torch.dtype, load_format: str = "auto") -> Checkpoint:
    """The checkpoint of a model. What must be computed to be read (FP8, for one) comes in `dtype`."""
    # Imported where they are needed: most checkpoints are plain, and start-up is counted in milliseconds.
    if facts.path.is_file():
        from quire.worker.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(facts, dtype)
    declared = declared_quantization(facts.hf_config)
    if load_format == "pt":
        from quire.worker.checkpoints.pickled_files import PickledFiles

        if declared is not None:
            raise ModelError(
                f"load_format=pt: the checkpoint comes quantised as {declared.get('quant_method')}, which is read from "
                "safetensors alone. Take it as safetensors."
            )
        return PickledFiles(facts.path)
    files = CheckpointFiles(facts.path)
    if declared is None:
        return files
    from quire.worker.checkpoints.quantized_files import QuantizedFiles, format_of

    return QuantizedFiles(files, format_of(declared, dtype))
