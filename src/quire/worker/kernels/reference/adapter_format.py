"""How the two thin matrices of an adapter lie in a slot: as they are read. `csrc/cpu/adapters.h` describes the panels.

All homes share this layout. An adapter of a lesser rank than the slot takes the beginning of its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_COLUMNS = 16
_STEP = 16


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class AdapterFormat:
    """Of the slots of one layer; `parts` are the outputs of the layers that it is merged of."""

    num_inputs: int
    parts: tuple[int, ...]
    dtype: torch.dtype

    @property
    def _word(self) -> int:
        return 2 if self.dtype == torch.bfloat16 else 1

    @property
    def padded_inputs(self) -> int:
        return _round_up(self.num_inputs, _STEP * self._word)

    def padded_rank(self, rank: int) -> int:
        words = -(-rank // self._word)
        return (words if words < _STEP else _round_up(words, _STEP)) * self._word

    def _num_low(self, rank: int) -> int:
        """Columns of a, with those that fill its last panel."""
        return _round_up(len(self.parts) * self.padded_rank(rank), _COLUMNS)

    @property
    def _num_outputs(self) -> int:
        return sum(_round_up(part, _COLUMNS) for part in self.parts)

    def sizes(self, rank: int) -> tuple[int, int]:
        """Elements of a and of b."""
        return self._num_low(rank) * self.padded_inputs, self._num_outputs * self.padded_rank(rank)

    def pack(self, a: list[Tensor], b: list[Tensor]) -> tuple[Tensor, Tensor]:
        """a: [rank, inputs] of each part; b: [outputs, rank] of each part."""
        rank = len(a[0])
        low = self.padded_rank(rank)
        columns_of_a = a[0].new_zeros((self._num_low(rank), self.padded_inputs))
        columns_of_b = b[0].new_zeros((self._num_outputs, low))
        first = 0
        for number, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
            columns_of_a[number * low : number * low + rank, : self.num_inputs] = of_a
            columns_of_b[first : first + len(of_b), :rank] = of_b
            first += _round_up(len(of_b), _COLUMNS)
        return self._panels(columns_of_a), self._panels(columns_of_b)

    def unpack(self, a: Tensor, b: Tensor, rank: int) -> tuple[list[Tensor], list[Tensor]]:
        """What was packed, from the memory of a slot."""
        low = self.padded_rank(rank)
        size_of_a, size_of_b = self.sizes(rank)
        columns_of_a = self._columns(a[:size_of_a], self.padded_inputs)
        columns_of_b = self._columns(b[:size_of_b], low)
        of_a: list[Tensor] = []
        of_b: list[Tensor] = []
        first = 0
        for number, part in enumerate(self.parts):
            of_a.append(columns_of_a[number * low : number * low + rank, : self.num_inputs])
            of_b.append(columns_of_b[first : first + part, :rank])
            first += _round_up(part, _COLUMNS)
        return of_a, of_b

    def _panels(self, columns: Tensor) -> Tensor:
        """[columns, values] -> [panels, words, columns of a panel, values of a word], flat"""
        return columns.view(-1, _COLUMNS, columns.shape[1] // self._word, self._word).transpose(1, 2).flatten()

    def _columns(self, panels: Tensor, num_values: int) -> Tensor:
        words = panels.view(-1, num_values // self._word, _COLUMNS, self._word)
        return words.transpose(1, 2).reshape(-1, num_values)
