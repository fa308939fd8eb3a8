"""FP8 weights: numbers of 8 bits with a scale for the tensor, for each output, or for each block of outputs and inputs.

    weight  float8 [N, K]      weight_scale  [1], [N, 1] or [blocks of N, blocks of K]      weight_scale_inv  the same

No CPU multiplies FP8, so weights are converted once, here, and not at every step. Whatever the second name says, both
are what a stored number is multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.worker.checkpoints.stored_module import StoredModule, unsupported
from quire.worker.layers.quantization import by_rows
from quire.worker.layers.stored_weight import StoredWeight

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Scales of inputs, which are not rounded here, and of a KV cache.
ACTIVATION_LEAVES = ("input_scale", "input_scale_inv", "input_scale_ub", "activation_scale", "k_scale", "v_scale")
_SCALES = ("weight_scale_inv", "weight_scale")


class FP8Format:
    leaves: tuple[str, ...] = ("weight", *_SCALES)
    ignored: tuple[str, ...] = ACTIVATION_LEAVES

    def __init__(self, declared: dict[str, Any], dtype: torch.dtype) -> None:
        kind = declared.get("fmt", "e4m3")
        if kind not in ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
            raise unsupported("fmt", kind, ("e4m3", "e5m2"))
        self._block = block_sizes("weight_block_size", declared.get("weight_block_size"))
        self._dtype = dtype
        self._num_converted = 0

    def is_quantized(self, module: StoredModule) -> bool:
        return "weight" in module.leaves and any(leaf in module.leaves for leaf in _SCALES)

    def weights(self, module: StoredModule) -> Iterator[tuple[str, StoredWeight]]:
        yield f"{module.name}.weight", self._weight(module)

    def _weight(self, module: StoredModule) -> StoredWeight:
        weight = module.get("weight")
        scale = module.get(next(leaf for leaf in _SCALES if leaf in module.leaves))
        self._num_converted += 1
        return converted(module, weight, scale, self._block, self._dtype)

    def remarks(self) -> list[str]:
        return [remark(self._num_converted, self._dtype)] if self._num_converted else []


def block_sizes(field: str, declared: Any) -> tuple[int, ...] | None:
    """Rows and columns that share a scale, as config.json says it."""
    if declared is None:
        return None
    if (
        not isinstance(declared, list)
        or len(declared) != 2
        or not all(isinstance(size, int) and size > 0 for size in declared)
    ):
        raise unsupported(field, declared, ("two numbers, such as [128, 128]",))
    return tuple(declared)


def remark(num_layers: int, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"{num_layers} layers were converted from FP8 to {name}, which a CPU can multiply"


def converted(
    module: StoredModule, weight: Tensor, scale: Tensor, block: tuple[int, ...] | None, dtype: torch.dtype
) -> StoredWeight:
    """The float weight [N, K]."""
    module.check(weight.dtype in FLOAT8 and weight.ndim == 2, "weight", weight, "a matrix of FP8")
    num_rows, num_columns = weight.shape
    # rows and columns that share a scale
    sizes = block or (128, 128)
    if scale.numel() == 1:
        scale, sizes = scale.view(1, 1), (num_rows, num_columns)
    elif block is None and scale.numel() == num_rows and scale.shape[-1] in (1, num_rows):
        scale, sizes = scale.reshape(num_rows, 1), (1, num_columns)
    wanted = (-(-num_rows // sizes[0]), -(-num_columns // sizes[1]))
    fits = tuple(scale.shape) == wanted
    module.check(fits, "weight_scale", scale, f"{list(wanted)} for blocks of {sizes[0]} x {sizes[1]}")

    def read_part(rows: slice, columns: slice) -> Tensor:
        part = weight[rows, columns]
        out = torch.empty(part.shape, dtype=dtype)
        # Scales are spread over their blocks chunk by chunk: as a matrix they would be larger than the weight.

        def convert(chunk: slice) -> None:
            scale_rows = torch.arange(rows.start + chunk.start, rows.start + chunk.stop) // sizes[0]
            spread = scale[scale_rows].to(torch.float32).repeat_interleave(sizes[1], 1)[:, columns]
            out[chunk] = part[chunk].to(torch.float32).mul_(spread)

        by_rows(part.shape[0], part.shape[1], convert)
        return out

    return StoredWeight.of(weight.shape, weight.nbytes + scale.nbytes, read_part)
