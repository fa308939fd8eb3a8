"""4-bit floats (E2M1), two in a byte with the earlier one in the low half, with a scale for each group of inputs.

A scale may be a power of two (E8M0, uint8: the exponent + 127; groups of 32), or an FP8 number times one of the whole
tensor (groups of 16).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.worker.checkpoints.codes import parts_of
from quire.worker.checkpoints.fp8 import FLOAT8
from quire.worker.checkpoints.stored_module import StoredModule
from quire.worker.layers.quantization import QuantizedWeight
from quire.worker.layers.stored_weight import StoredWeight

_EXPONENT_OF_ONE = 127
_MOST_EXPONENT = 252
# Twice the values of the codes: whole numbers.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# a pair of numbers as one, so that a byte is looked up once
_PAIRS = torch.tensor([[_DOUBLED[byte & 15], _DOUBLED[byte >> 4]] for byte in range(256)], dtype=torch.int8)
_PAIRS_AS_ONE = _PAIRS.view(torch.int16).flatten()


def float4_weight(
    packed_NB: Tensor,
    group: int,
    num_bytes: int,
    halves_of: Callable[[slice, slice], Tensor],
    *,
    is_dequantized: bool = False,
) -> StoredWeight:
    """`packed`: uint8 [N, K / 2]. `halves_of`: of these rows and groups, half of each scale in float32."""
    num_rows, num_columns = packed_NB.shape[0], 2 * packed_NB.shape[1]

    def read_part(rows: slice, columns: slice) -> Tensor | QuantizedWeight:
        codes = packed_NB[rows, columns.start // 2 : columns.stop // 2]
        values_NK = _PAIRS_AS_ONE.index_select(0, codes.flatten().int()).view(torch.int8).view(len(codes), -1)
        halves = halves_of(rows, parts_of(columns, group)).contiguous()
        weight = QuantizedWeight(values_NK, halves, None, bits=4, weight_only=True)
        return weight.dequantize(torch.float32) if is_dequantized else weight

    return StoredWeight.of((num_rows, num_columns), num_bytes, read_part, column_step=group)


def halved_powers(exponents: Tensor) -> Tensor:
    """E8M0 to half of the scales. 255 means no number in this format, and with 253 the largest code is none in float32:
    both become infinities, which are refused."""
    halves = torch.full(exponents.shape, 0.5)
    return torch.ldexp(halves, exponents.int() - _EXPONENT_OF_ONE).masked_fill_(exponents > _MOST_EXPONENT, torch.inf)


def scale_of_tensor(module: StoredModule, leaf: str) -> Tensor | None:
    """The number that all FP8 scales of a module go with; None: it has none."""
    scale = module.find(leaf)
    if scale is None:
        return None
    module.check(scale.numel() == 1, leaf, scale, "one number")
    number = scale.to(torch.float32).reshape(())
    if not number.isfinite():
        raise ModelError(f"{module.name}.{leaf}: is infinite or NaN. Download the checkpoint again.")
    return number


def stored_float4(module: StoredModule, leaf: str, of_tensor: Tensor | None, dtype: torch.dtype) -> StoredWeight:
    """The weight of a module: codes under this name, and `weight_scale`, which is FP8 times `of_tensor`.

    Packed scales have 11 bits, which powers of two and FP8 fit in, but not their products: a model in float32 gets
    floats.
    """
    packed, scales = module.get(leaf), module.get("weight_scale")
    is_whole = packed.dtype == torch.uint8 and packed.ndim == 2 and packed.numel() > 0
    module.check(is_whole, leaf, packed, "uint8 [outputs, inputs / 2]")
    num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
    group = 32 if of_tensor is None else 16
    kinds = (torch.uint8,) if of_tensor is None else FLOAT8
    fits = scales.dtype in kinds and scales.shape == (num_rows, num_columns // group) and num_columns % group == 0
    kind = "exponents (uint8)" if of_tensor is None else "FP8"
    module.check(fits, "weight_scale", scales, f"{kind} {[num_rows, num_columns // group]}")

    def halves_of(rows: slice, groups: slice) -> Tensor:
        part = scales[rows, groups]
        return halved_powers(part) if of_tensor is None else part.to(torch.float32) * (0.5 * of_tensor)

    is_dequantized = of_tensor is not None and dtype == torch.float32
    return float4_weight(packed, group, packed.nbytes + scales.nbytes, halves_of, is_dequantized=is_dequantized)
