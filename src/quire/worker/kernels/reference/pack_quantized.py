"""A quantised weight that describes itself."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels.reference.packed_format import FP4, FP4_VALUES, PackedHeader, assemble


def pack_quantized(
    values_NK: Tensor, scales_NG: Tensor, offsets_NG: Tensor | None, bits: int, weight_only: bool
) -> Tensor:
    """weight = scales * values + offsets, a scale for each K / G inputs.

    Values have a byte each: int8, or unsigned codes from 0 on (those of 4 bits go up to 15). Values of 4 bits in int8
    are twice those of the 4-bit floats E2M1. Homes may round the scales of groups, and zeros (-offset / scale), to 11
    bits of precision.
    """
    is_signed = values_NK.dtype == torch.int8
    codes_NK = (values_NK.int() + 128).to(torch.uint8) if is_signed else values_NK
    is_fp4 = is_signed and bits == 4
    if is_fp4 and not torch.isin(values_NK, torch.tensor(FP4_VALUES, dtype=torch.int8)).all():
        raise ValueError("values of 4 bits in int8 must be 0, 1, 2, 3, 4, 6, 8, 12 or their negatives")
    least = -32 if is_signed else 0
    if bits == 6 and not ((values_NK >= least) & (values_NK < least + 64)).all():
        raise ValueError("values of 6 bits must be -32 to 31, or 0 to 63 in uint8")
    (num_rows, num_columns), num_groups = values_NK.shape, scales_NG.shape[1]
    header = PackedHeader(
        FP4 if is_fp4 else bits,
        num_rows,
        num_columns,
        group=0 if num_groups == 1 else num_columns // num_groups,
        zero_point=128 if is_signed else 0,
        has_offsets=offsets_NG is not None,
        is_weight_only=weight_only,
    )
    pieces = [codes_NK, scales_NG.float()] + ([] if offsets_NG is None else [offsets_NG.float()])
    return assemble(header, *pieces)
