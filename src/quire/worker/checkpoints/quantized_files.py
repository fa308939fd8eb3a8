"""Safetensors whose layers are quantised: several tensors are one weight.

    model.layers.0.mlp.up_proj.qweight   .qzeros   .scales   .g_idx   ->   model.layers.0.mlp.up_proj.weight

Owns the way from tensors to modules. A file is ordered by type, so the codes of all layers come before all scales;
here a layer's tensors are read together, and its weight is handed on before the next one is touched. Must never guess:
a module without a tensor that it needs is an error, and what is stored beside decides nothing that config.json says
differently. A format is a file in this folder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.config.quantization import FORMATS
from quire.worker.checkpoint_files import CheckpointFiles
from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.stored_weight import StoredWeight

_logger = logging.getLogger(__name__)


class StoredFormat(Protocol):
    """How one quant_method stores a weight."""

    # tensors that make up a weight, and those that mean nothing here
    leaves: tuple[str, ...]
    ignored: tuple[str, ...]

    def is_quantized(self, module: StoredModule) -> bool:
        """Whether this module's weight is stored in this format."""
        ...

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        """What a module that is stands for, under the names of a plain checkpoint: most have one weight."""
        ...

    def remarks(self) -> list[str]:
        """What a user should know after everything has been read."""
        ...


class QuantizedFiles:
    """The tensors of a checkpoint, with those of quantised layers put together."""

    def __init__(self, files: CheckpointFiles, stored: StoredFormat) -> None:
        self._files = files
        self._format = stored

    @property
    def num_bytes(self) -> int:
        return self._files.num_bytes

    def tensors(self) -> Iterator[tuple[str, Tensor | StoredWeight]]:
        by_module: dict[str, dict[str, str]] = {}
        for names in self._files.names_by_file.values():
            for name in names:
                module, _, leaf = name.rpartition(".")
                by_module.setdefault(module, {})[leaf] = name
        with self._files.opened() as read:
            for name, leaves in by_module.items():
                yield from self._of_module(StoredModule(name, leaves, read))
        for remark in self._format.remarks():
            _logger.info(remark)

    def _of_module(self, module: StoredModule) -> Iterator[tuple[str, Tensor | StoredWeight]]:
        is_quantized = self._format.is_quantized(module)
        if is_quantized:
            yield from self._format.weights(module)
        for leaf, name in module.leaves.items():
            if leaf not in self._format.ignored and not (is_quantized and leaf in self._format.leaves):
                yield name, module.get(leaf)


def format_of(declared: dict[str, Any], dtype: torch.dtype) -> StoredFormat:
    """The reader for what config.json declares; weights that must be computed come in `dtype`."""
    method = str(declared.get("quant_method", "")).lower()
    if method == "gptq":
        from quire.worker.checkpoints.gptq import GPTQFormat

        return GPTQFormat(declared, dtype)
    if method == "awq":
        from quire.worker.checkpoints.awq import AWQFormat

        return AWQFormat(declared)
    if method == "compressed-tensors":
        from quire.worker.checkpoints.compressed_tensors import CompressedTensorsFormat

        return CompressedTensorsFormat(declared, dtype)
    if method in ("fp8", "fbgemm_fp8"):
        from quire.worker.checkpoints.fp8 import FP8Format

        return FP8Format(declared, dtype)
    if method == "mxfp4":
        from quire.worker.checkpoints.mxfp4 import MXFP4Format

        return MXFP4Format()
    if method == "modelopt":
        from quire.worker.checkpoints.modelopt import ModelOptFormat

        return ModelOptFormat(declared, dtype)
    raise unsupported("quant_method", declared.get("quant_method"), [name for name in FORMATS if name != "gguf"])
