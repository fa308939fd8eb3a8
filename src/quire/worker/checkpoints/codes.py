"""Whole numbers packed into 32-bit words, and codes with zero points turned into a QuantizedWeight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.worker.checkpoints.stored_module import StoredModule
from quire.worker.layers.quantization import QuantizedWeight, by_rows

_WORD_BITS = 32
_BYTES = 4


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """[N, words] with the codes of a row one after the other, lowest bits first, to [N, codes] as bytes."""
    return _codes(packed.contiguous().view(torch.uint8), bits)


def unpack_columns(packed: Tensor, bits: int) -> Tensor:
    """[words, N] with the codes of a column one below the other, to [N, codes] as bytes: the transposed matrix."""
    num_words, num_columns = packed.shape
    as_bytes = packed.contiguous().view(torch.uint8).view(num_words, num_columns, _BYTES)
    return _codes(as_bytes.transpose(0, 1).reshape(num_columns, num_words * _BYTES), bits)


def _codes(as_bytes: Tensor, bits: int) -> Tensor:
    """Words are little endian, so a byte holds one code of 8 bits, or two of 4 with the earlier one in the low half."""
    if bits == 8:
        return as_bytes
    codes = torch.empty(*as_bytes.shape, 2, dtype=torch.uint8)
    torch.bitwise_and(as_bytes, 0xF, out=codes[..., 0])
    torch.bitwise_right_shift(as_bytes, 4, out=codes[..., 1])
    return codes.flatten(-2)


def per_word(bits: int) -> int:
    """Codes in a word."""
    return _WORD_BITS // bits


def parts_of(numbers: slice, step: int) -> slice:
    """Which words, or groups, of so many numbers each hold these."""
    return slice(numbers.start // step, -(-numbers.stop // step))


def quantized(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, bits: int, *, weight_only: bool
) -> QuantizedWeight:
    """w = scales * (codes - zeros), codes from 0 on as bytes."""
    scales, zeros = scales_NG.to(torch.float32).contiguous(), zeros_NG.to(torch.float32)
    if bits == 8:
        # The upper half of the bytes becomes the numbers from 0 on, the lower half the negative ones.
        codes_NK, zeros = (codes_NK ^ 0x80).view(torch.int8), zeros - 128
    offsets = None if bits == 8 and not zeros.any() else (scales * zeros).neg_()
    return QuantizedWeight(codes_NK, scales, offsets, bits=bits, weight_only=weight_only)


@dataclass
class Reordered:
    """How many layers of a checkpoint had inputs in an order of their own."""

    kind: str
    dtype: torch.dtype
    count: int = 0

    def remarks(self) -> list[str]:
        if not self.count:
            return []
        return [
            f"{self.count} layers of this {self.kind} checkpoint have inputs in an order of their own (act-order): "
            f"they were dequantised to {str(self.dtype).removeprefix('torch.')}"
        ]


def are_in_order(module: StoredModule, leaf: str, groups_K: Tensor, num_inputs: int, num_groups: int) -> bool:
    """Whether the groups are the first inputs, the next ones, and so on."""
    fits = groups_K.shape == (num_inputs,) and int(groups_K.min()) >= 0 and int(groups_K.max()) < num_groups
    module.check(fits, leaf, groups_K, f"{num_inputs} numbers below {num_groups}")
    if num_inputs % num_groups:
        return False
    return torch.equal(groups_K.long(), torch.arange(num_inputs) // (num_inputs // num_groups))


def dequantized_in_order(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor, groups_K: Tensor, dtype: torch.dtype
) -> Tensor:
    """The weight itself, where the group of each input stands in a table."""
    weight = torch.empty(codes_NK.shape, dtype=dtype)

    def compute(rows: slice) -> None:
        steps = codes_NK[rows].to(torch.float32) - zeros_NG[rows].to(torch.float32)[:, groups_K]
        weight[rows] = steps.mul_(scales_NG[rows].to(torch.float32)[:, groups_K])

    num_rows, num_columns = codes_NK.shape
    by_rows(num_rows, num_columns, compute)
    return weight
