"""What every home of the kernels on packed weights must do; see `kernel_contracts.py` for how a new home uses it.

Results are compared with dense arithmetic in float64 on the weight that the packed one stands for. With quantised
activations that is exact but for the float32 sums of a few segments, so the bounds stay narrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.worker.kernels.reference.packed_format import FP4_VALUES
from quire.worker.kernels.reference.packed_linear import rounded_to_int8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the sum of the sizes of all terms, for sums in float32; and of the result, for its own rounding.
SUM_TOLERANCE = 2e-6
ROUNDING = {torch.float32: 1e-7, torch.bfloat16: 1.0 / 256, torch.float16: 1.0 / 2048}
# (outputs, inputs): one panel and several, odd ones, no multiple of a word or of a vector.
SHAPES = ((1, 1), (1, 5), (32, 16), (33, 7), (70, 100), (96, 129), (5, 640), (130, 513))
ROWS = (0, 1, 2, 7, 13, 64, 300)


@dataclass(frozen=True)
class QuantizedCase:
    """A quantised weight. `zeros`: none, one for all ("same", becomes a zero point), or one for each group."""

    bits: int = 8
    shape: tuple[int, int] = (70, 256)
    num_groups: int = 1
    zeros: str = "none"
    is_signed: bool = True
    is_weight_only: bool = False
    scale: float = 0.01

    def __str__(self) -> str:
        of_4_bits = "fp4" if self.is_signed else "int4"
        kind = of_4_bits if self.bits == 4 else f"{'s' if self.is_signed else 'u'}int{self.bits}"
        name = f"{kind}-{self.shape[0]}x{self.shape[1]}-g{self.num_groups}-{self.zeros}"
        return name + "-weight_only" * self.is_weight_only + f"-{self.scale:g}" * (self.scale != 0.01)

    def make(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, scales and offsets. Scales and zeros have no more bits than any home keeps."""
        generator = torch.Generator().manual_seed(0)
        (num_rows, num_columns), groups = self.shape, self.num_groups
        low, high, dtype = 0, 2**self.bits, torch.uint8
        if self.is_signed:
            low, high, dtype = -high // 2, high // 2, torch.int8
        values = torch.randint(low, high, (num_rows, num_columns), generator=generator).to(dtype)
        if self.bits == 4 and self.is_signed:
            values = torch.tensor(FP4_VALUES, dtype=dtype)[values.long() % len(FP4_VALUES)]
        scales = (torch.rand(num_rows, groups, generator=generator) + 0.1).half().float()
        scales *= 2.0 ** round(torch.tensor(self.scale).log2().item())
        zeros = {
            "none": None,
            "same": torch.full_like(scales, 7.0),
            "each": torch.randint(0, 16, scales.shape, generator=generator).float(),
            "fractions": torch.randn(scales.shape, generator=generator).half().float(),
        }[self.zeros]
        return values, scales, None if zeros is None else -zeros * scales


QUANTIZED_CASES = (
    *(
        QuantizedCase(bits, shape, groups, zeros, is_signed, is_weight_only)
        for bits, is_signed in ((8, True), (8, False), (6, True), (6, False), (4, False), (4, True))
        for is_weight_only in (False, True)
        for shape, groups, zeros in (
            ((1, 4), 1, "none"),
            ((33, 7), 1, "none"),
            ((33, 7), 1, "same"),
            ((70, 1000), 1, "fractions"),
            ((130, 1024), 8, "same"),
            ((32, 512), 16, "each"),
            ((40, 384), 3, "fractions"),
            ((48, 192), 2, "each"),  # groups of 96: segments of 96 and of 32 inputs
            ((33, 64), 16, "none"),  # groups of 4
            ((64, 256), 16, "fractions"),
        )
    ),
    QuantizedCase(4, (33, 256), 8, "each", False, scale=1e-20),  # scales that float16 alone cannot hold
    QuantizedCase(6, (33, 256), 8, "none", True, scale=1e-20),
    QuantizedCase(8, (33, 256), 8, "none", True, scale=1e9),
)


def inputs(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of different size, some zero."""
    generator = torch.Generator().manual_seed(num_columns)
    x = torch.randn(num_rows, num_columns, generator=generator) * torch.logspace(-2, 2, num_rows)[:, None]
    x[3::5] = 0
    return x.to(dtype)


def check_close(y: Tensor, x: Tensor, weight_NK: Tensor, bias: Tensor | None, seen: Tensor | None = None) -> None:
    """y = x W^T + bias, where the weight meets `seen` in place of x. One chain of float32 sums, then rounding."""
    seen = (x if seen is None else seen).double()
    expected, terms = seen @ weight_NK.double().T, seen.abs() @ weight_NK.double().abs().T
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    least = torch.finfo(x.dtype).smallest_normal  # below it, rounding is absolute
    bound = SUM_TOLERANCE * terms + ROUNDING[x.dtype] * expected.abs().clamp(min=least)
    error = (y.double() - expected).abs()
    assert (error <= bound).all(), f"{x.dtype}: off by {(error / bound).nan_to_num().max():.3g} bounds"


def check_float_weight(kernels: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Packing, the way back, rows, and products with inputs of every dtype."""
    num_rows, num_columns = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed = kernels.pack_weight(weight)
    assert torch.equal(kernels.unpack_weight(packed), weight.float())
    ids = torch.arange(num_rows).flip(0)[:5]
    for row_dtype in DTYPES:
        assert torch.equal(kernels.packed_rows(packed, ids, row_dtype, num_columns), weight[ids].to(row_dtype))
    for x_dtype in DTYPES:
        for bias in (None, torch.randn(num_rows), torch.randn(num_rows).to(dtype)):
            x = inputs(20, num_columns, x_dtype)
            check_close(kernels.packed_linear(x, packed, bias, num_rows), x, weight, bias)


def check_quantized_weight(kernels: Any, case: QuantizedCase) -> None:
    """The same for a quantised weight. Integers are multiplied: the same rounding of the inputs on both sides."""
    num_rows, num_columns = case.shape
    values, scales, offsets = case.make()
    packed = kernels.pack_quantized(values, scales, offsets, bits=case.bits, weight_only=case.is_weight_only)
    weight = (values.double().unflatten(1, (case.num_groups, -1)) * scales.double()[..., None]).flatten(1)
    if offsets is not None:
        weight += offsets.double().repeat_interleave(num_columns // case.num_groups, dim=1)
    torch.testing.assert_close(kernels.unpack_weight(packed).double(), weight, rtol=1e-6, atol=1e-6 * case.scale)
    ids = torch.arange(num_rows).flip(0)[:5]
    rows = kernels.packed_rows(packed, ids, torch.float32, num_columns)
    assert torch.equal(rows, kernels.unpack_weight(packed)[ids])
    bias = torch.randn(num_rows) * case.scale
    for dtype in DTYPES if case.scale == 0.01 else DTYPES[:1]:
        x = inputs(20, num_columns, dtype)
        seen = x if case.is_weight_only else rounded_to_int8(x.float())
        check_close(kernels.packed_linear(x, packed, bias, num_rows), x, weight, bias, seen)


def check_invariance(kernels: Any, packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A row has the same bits alone and among others."""
    num_rows, num_columns = shape
    x = inputs(max(ROWS), num_columns, dtype)
    whole = kernels.packed_linear(x, packed, None, num_rows)
    for count in ROWS:
        assert torch.equal(kernels.packed_linear(x[:count], packed, None, num_rows), whole[:count]), f"{count} rows"
    assert torch.equal(kernels.packed_linear(x[250:], packed, None, num_rows), whole[250:])
