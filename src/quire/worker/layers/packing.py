"""Weights in the layout that the processor's matrix instructions read fastest, packed once after loading (CPU).

Measured on 2 cores of a Zen 4 with AVX512-BF16, weights from DRAM, CPU time of 1 thread, [M, 1024] x [3072, 1024]:

    bfloat16  M=1: 0.61 -> 0.39 ms   M=4: 0.68 -> 0.33   M=16: 1.02 -> 0.62   M=64: 2.35 -> 1.93   same bits
    float32   M=1: 0.83 -> 0.80   M=4: 1.40 -> 0.61   M=16: 2.16 -> 1.16   M=64: 5.23 -> 3.79   differs by rounding

A call of the packed operator costs some 12 us. In bfloat16 F.linear costs as much; in float32 it costs 4 us, so small
weights stay as they are. The operators belong to torch's own graph optimiser and are not a public interface, hence the
guards: without them everything runs through F.linear.
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

# The number of rows that the layout is chosen for; any number can be multiplied.
_ROWS_HINT = 64
# float32 [1152, 192] still loses 6 us for one row and wins 12 us for four; [192, 192] loses always.
_LEAST_FLOAT32 = 2**18

# Bound once: looking an operator up costs more than calling it. None where torch has no such operators.
_pointwise = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
_reorder = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


class PackedWeight:
    """A weight in the processor's layout. It is opaque: only `multiply` can use it."""

    def __init__(self, tensor: Tensor, num_rows: int) -> None:
        self.tensor = tensor
        self.num_rows = num_rows
        self.index = next(_indices)
        _weights[self.index] = self


# torch.compile can take neither the tensor nor the object, but the number of a weight. None is used twice.
_weights: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()
_indices = itertools.count()


def multiply(x: Tensor, weight: Tensor, packed: PackedWeight | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, with the packed copy of the weight where there is one."""
    if packed is None:
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return torch.ops.quire.packed_linear(x, bias, packed.index, packed.num_rows)
    return _multiply_packed(x, packed, bias)


def _multiply_packed(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    assert _pointwise is not None, "nothing is packed without the operator"
    return _pointwise(x, packed.tensor, bias, "none", [], "")


def pack(weight: Tensor) -> PackedWeight | None:
    """A packed copy of a weight [out, in], or None where packing is not possible or gains nothing."""
    if weight.device.type != "cpu" or weight.ndim != 2 or not _can_pack(weight.dtype):
        return None
    if weight.dtype == torch.float32 and weight.numel() < _LEAST_FLOAT32:
        return None
    assert _reorder is not None, "nothing is packed without the operator"
    return PackedWeight(_reorder(weight.contiguous(), _ROWS_HINT), weight.shape[0])


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if _pointwise is None or _reorder is None or not _processor_multiplies(dtype):
        return False
    try:
        # A small trial: an operator that changed its arguments must cost speed, not the start.
        weight, x = torch.eye(32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
        result = _pointwise(x, _reorder(weight, _ROWS_HINT), None, "none", [], "")
    except (RuntimeError, TypeError):
        return False
    return bool(torch.equal(result, x))


def _processor_multiplies(dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return True
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return name is not None and hasattr(torch.ops.mkldnn, name) and bool(getattr(torch.ops.mkldnn, name)())


def _packed_linear(x: Tensor, bias: Tensor | None, index: int, num_rows: int) -> Tensor:
    return _multiply_packed(x, _weights[index], bias)


_library = torch.library.Library("quire", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor? bias, SymInt index, SymInt num_rows) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake(
    "quire::packed_linear", lambda x, bias, index, num_rows: x.new_empty((*x.shape[:-1], num_rows)), lib=_library
)
