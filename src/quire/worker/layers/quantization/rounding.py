"""Float weights rounded to 8, 6 or 4 bits: the arithmetic that the schemes share.

Works on some rows at a time, so that a large weight never stands beside a copy of itself in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.worker.layers.quantization.by_rows import by_rows
from quire.worker.layers.quantization.quantized_weight import QuantizedWeight

GROUP = 32
_INT8_MOST = 127.0
# Below it a row or group counts as zeros: its inverse would not be a finite number.
_LEAST_SCALE = 1e-30
# Steps of a group's largest weight at which the code of greatest magnitude, -8, is put. Some large weights may be cut
# off if that serves the many small ones: the step with the least squared error wins, and is fitted once more.
_INT4_STEPS = (8.0, 8.6)


def to_int8(weight_NK: Tensor, *, weight_only: bool) -> QuantizedWeight:
    """Symmetric, one scale an output."""
    num_rows, num_columns = weight_NK.shape
    values = torch.empty(num_rows, num_columns, dtype=torch.int8, device=weight_NK.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=weight_NK.device)

    def round_rows(rows: slice) -> None:
        chunk = weight_NK[rows].to(torch.float32)
        scale = chunk.abs().amax(1, keepdim=True).div_(_INT8_MOST).clamp_(min=_LEAST_SCALE)
        values[rows] = (chunk / scale).round_().clamp_(-_INT8_MOST, _INT8_MOST)
        scales[rows] = scale

    by_rows(num_rows, num_columns, round_rows)
    return QuantizedWeight(values, scales, None, bits=8, weight_only=weight_only)


def to_int6(weight_NK: Tensor, *, weight_only: bool) -> QuantizedWeight:
    """Groups of inputs with a scale each; -32 to 31 steps."""
    values, scales = _in_groups(weight_NK, torch.int8, _nearest_int6)
    return QuantizedWeight(values, scales, None, bits=6, weight_only=weight_only)


def to_int4(weight_NK: Tensor, *, weight_only: bool) -> QuantizedWeight:
    """Groups of inputs with a scale each; codes 0 to 15 stand for -8 to 7 steps."""
    values, scales = _in_groups(weight_NK, torch.uint8, _best_int4)
    return QuantizedWeight(values, scales, scales * -8.0, bits=4, weight_only=weight_only)


def _in_groups(
    weight_NK: Tensor, dtype: torch.dtype, codes_of: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Codes and scales; `codes_of` makes them of groups, a row each."""
    num_rows, num_columns = weight_NK.shape
    values = torch.empty(num_rows, num_columns, dtype=dtype, device=weight_NK.device)
    scales = torch.empty(num_rows, num_columns // GROUP, dtype=torch.float32, device=weight_NK.device)

    def round_rows(rows: slice) -> None:
        codes, scale = codes_of(weight_NK[rows].to(torch.float32).reshape(-1, GROUP))
        values[rows] = codes.view(-1, num_columns)
        scales[rows] = scale.view(-1, num_columns // GROUP)

    by_rows(num_rows, num_columns, round_rows)
    return values, scales


def _largest(groups: Tensor) -> Tensor:
    """The code of greatest magnitude has no opposite, so the largest weight goes to that end, whatever its sign."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    return torch.where(high > -low, high, low)


def _nearest_int6(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -32 to 31 and scale of each group. Better steps, found as below, gain 2 % of the error."""
    scale = _largest(groups) / -32.0
    scale = torch.where(scale.abs() < _LEAST_SCALE, 1.0, scale)
    return (groups / scale).round_().clamp_(-32.0, 31.0), scale


def _best_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 to 15 and scale of each group."""
    largest = _largest(groups)
    # NaN stays where a group holds infinities: whoever asked finds it among the scales.
    scale = torch.where(largest.isfinite(), 1.0, torch.nan)
    most_explained = torch.zeros_like(largest)
    for steps in _INT4_STEPS:
        tried = largest / -steps
        codes, fitted, explained = _rounded(groups, torch.where(tried.abs() < _LEAST_SCALE, 1.0, tried))
        scale = torch.where(explained > most_explained, fitted, scale)
        most_explained = torch.maximum(explained, most_explained)
    codes, scale, _ = _rounded(groups, scale)
    return codes.add_(8.0), scale


def _rounded(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest codes, the scale that is best for these codes, and how much of the squares of the weights is
    explained by both: the rest is the squared error."""
    codes = (groups / scale).round_().clamp_(-8.0, 7.0)
    product, square = (groups * codes).sum(1, keepdim=True), codes.square().sum(1, keepdim=True)
    explained = product.square().div_(square.clamp(min=1.0))
    return codes, torch.where(square > 0, product / square.clamp(min=1.0), scale), explained
