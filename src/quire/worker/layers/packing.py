"""Weights in the layout in which their device multiplies them fastest, packed once after loading.

A packed weight is a plain tensor of bytes that describes itself (`worker/kernels/linear.py`), so that torch.compile,
copies and files need not know about it. Codes are packed everywhere. Floats are packed where the kernels in C++ run; on
a GPU they stay as they are and go through F.linear, unless several weights meet one batch (experts), or every sum is to
be formed in a fixed order (QUIRE_GPU_PRODUCTS=fixed).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.worker import kernels
from quire.worker.kernels import cpu, triton
from quire.worker.layers.parameter import take_quantized
from quire.worker.layers.quantization import QuantizedWeight

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def multiply(
    x: Tensor,
    weight: Tensor,
    packed: Tensor | None,
    bias: Tensor | None,
    num_rows: int,
    num_slices: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias, with the packed weight where there is one; `num_rows` is that of the weight.

    `num_slices`: of the inputs, each summed up by itself. `dtype`: of the result, if it is not that of x.
    """
    if packed is None:
        return F.linear(x, weight, bias) if dtype is None else F.linear(x, weight, bias).to(dtype)
    if num_slices == 1 and dtype is None:
        return kernels.packed_linear(x, packed, bias, num_rows)
    return kernels.sliced_linear(x, packed, bias, num_rows, num_slices=num_slices, dtype=dtype or x.dtype)


def pack(weight: Tensor, *, is_grouped: bool = False) -> Tensor | None:
    """A packed copy of a parameter [out, in], or None where nothing could multiply it. Codes that wait for a parameter
    (`take_quantized`) are packed in its place, whatever runs them: as floats they would not fit. `is_grouped`: it meets
    a batch together with others (`grouped_linear`)."""
    quantized = take_quantized(weight)
    if quantized is not None:
        return pack_quantized(quantized)
    if weight.ndim != 2 or weight.dtype not in _DTYPES or not _packs_floats(weight.device, is_grouped):
        return None
    return kernels.pack_weight(weight)


def _packs_floats(device: torch.device, is_grouped: bool) -> bool:
    if device.type == "cpu" and cpu.load():
        return True
    return (is_grouped or triton.has_fixed_order()) and triton.serves(device)


def multiplies_codes(device: torch.device) -> bool:
    """Whether codes stay codes there; the reference would make floats of them at every step."""
    return device.type == "cpu" or triton.serves(device)


def pack_quantized(weight: QuantizedWeight) -> Tensor:
    """The same for a quantised weight."""
    weight = weight.packable()
    # What a rank owns of a wider weight is a view of it.
    offsets = None if weight.offsets is None else weight.offsets.contiguous()
    return kernels.pack_quantized(
        weight.values.contiguous(),
        weight.scales.contiguous(),
        offsets,
        bits=weight.bits,
        weight_only=weight.weight_only,
    )
