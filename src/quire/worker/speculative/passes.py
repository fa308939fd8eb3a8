"""The passes of a model that drafts, over the block tables of the rows: one over tokens that it has not seen, then one
token a row and pass, as many as are to be proposed.

Owns: positions, slots and attention metadata of all passes, gathered at once before the first of them, because a pass
of a small model takes little longer than gathering would. Must never: write where the row has no block of its own.
Called by: `pass_runner.py`. Suffixes: S rows of the first pass, n rows that draft (the first ones of S), P passes after
the first.

                 position   0   1   2   3   4   5   6   7          starts 2, ends 5, count 4
    first pass                      ^   ^   ^                      its last hidden state proposes token 5
    3 passes more                               ^   ^   ^          propose 6, 7, 8
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.attention import Attention, AttentionBatch
from quire.worker.forward_context import ForwardContext
from quire.worker.row_table import RowTable
from quire.worker.staging import Array, to_device


class Pass(NamedTuple):
    """One run of the model. `num_rows` rows propose a token after it."""

    positions_T: Tensor
    context: ForwardContext
    num_rows: int


class Passes(NamedTuple):
    """All runs of a step, and the tokens of the first one."""

    row_T: IntArray
    position_T: IntArray
    # where the first pass has the last token of each row that drafts; None: the first tokens are these
    last_n: Tensor | None
    first: Pass
    others: list[Pass]


class PassBuilder:
    """Makes the passes of a step. `layers` are those of the draft, bound to a cache."""

    def __init__(self, layers: Iterable[Attention], table: RowTable) -> None:
        layers = list(layers)
        backend = layers[0].backend
        k_cache = layers[0].k_cache
        assert backend is not None, "load_model binds a backend"
        assert k_cache is not None, "the cache comes before the passes"
        self._backend = backend
        self._device = k_cache.device
        # tokens: each rank has a share of them
        self._block_size = k_cache.shape[2] * layers[0].ranks.size
        self._table = table
        self._groups = sorted({layer.group for layer in layers})
        # how far back the blocks of a group are kept: as far as its layers look, those of the target included
        self._windows = [table.windows[group] for group in self._groups]
        self._one_each = torch.arange(table.num_rows + 1, dtype=torch.int32, device=self._device)
        self._steps_P1 = np.arange(64, dtype=np.int64)[:, None]

    def build(
        self, rows_S: IntArray, starts_S: IntArray, ends_S: IntArray, counts_n: IntArray, computed_S: IntArray
    ) -> Passes:
        """The first pass computes [starts, ends) of each row. The first len(counts) rows draft; counts never rise.

        `computed_S`: what the target had computed before this step, from which on the blocks of a window are there.
        """
        num_drafting = len(counts_n)
        num_others = max(0, int(counts_n[0]) - 1) if len(counts_n) else 0
        lengths_S = ends_S - starts_S
        most = int(lengths_S.max())
        if most == 1:
            row_T = rows_S
            position_T = starts_S
            query_starts = self._one_each[: len(rows_S) + 1]
            arrays: list[Array] = []
        else:
            starts = np.zeros(len(rows_S) + 1, dtype=np.int32)
            np.cumsum(lengths_S, out=starts[1:])
            row_T = np.repeat(rows_S, lengths_S)
            position_T = np.arange(len(row_T)) + np.repeat(starts_S - starts[:-1], lengths_S)
            arrays = [starts, starts[1 : num_drafting + 1].astype(np.int64) - 1]
        position_Pn = ends_S[:num_drafting] + self._steps_P1[:num_others]
        furthest = int(ends_S.max()) + num_others
        arrays += [position_T, ends_S.astype(np.int32), position_Pn, (position_Pn + 1).astype(np.int32)]
        behind_T = None
        if any(self._windows) and (starts_S < computed_S).any():
            behind_T = np.repeat(computed_S, lengths_S) - position_T
        arrays += self._block_arrays(rows_S, row_T, position_T, position_Pn, furthest, behind_T)
        tensors = to_device(arrays, self._device)
        last_n = None
        if most > 1:
            query_starts, last_n, *tensors = tensors
        positions_T, seq_lens_S, positions_Pn, seq_lens_Pn, *blocks = tensors
        tables = blocks[0::3]
        slots = blocks[1::3]
        other_slots = blocks[2::3]
        longest = furthest - num_others
        first = self._pass(positions_T, query_starts, seq_lens_S, tables, slots, (most, longest), num_drafting)
        num_rows_P = (counts_n > self._steps_P1[1 : num_others + 1]).sum(1).tolist() if num_others else []
        others = [
            self._pass(
                positions_Pn[index, :num_rows],
                self._one_each[: num_rows + 1],
                seq_lens_Pn[index, :num_rows],
                [table[:num_rows] for table in tables],
                [slots_Pn[index, :num_rows] for slots_Pn in other_slots],
                (1, longest + index + 1),
                num_rows,
            )
            for index, num_rows in enumerate(num_rows_P)
        ]
        return Passes(row_T, position_T, last_n, first, others)

    def _block_arrays(
        self,
        rows_S: IntArray,
        row_T: IntArray,
        position_T: IntArray,
        position_Pn: IntArray,
        furthest: int,
        behind_T: IntArray | None,
    ) -> list[Array]:
        """For each group: block tables, and the slots of the first pass and of the others.

        `behind_T`: how far back a token lies, for those that the target computed long ago.
        """
        arrays: list[Array] = []
        size = self._block_size
        width = self._table.block_tables.shape[2]
        index_T, offset_T = np.divmod(position_T, size)
        index_Pn, offset_Pn = np.divmod(position_Pn, size)
        # Rows with few drafts have no block for the positions of those with many, and never run there.
        np.minimum(index_Pn, width - 1, out=index_Pn)
        rows_n = rows_S[: position_Pn.shape[1]]
        longest = -(-furthest // size)
        for group, window in zip(self._groups, self._windows, strict=True):
            table = self._table.block_tables[group]
            slots_T = table[row_T, index_T] * np.int64(size) + offset_T
            if window and behind_T is not None:
                # What the window has passed may belong to somebody else by now: such keys are not kept.
                slots_T[behind_T >= window] = -1
            arrays += [table[rows_S, :longest], slots_T, table[rows_n, index_Pn] * np.int64(size) + offset_Pn]
        return arrays

    def _pass(
        self,
        positions_T: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        tables: list[Tensor],
        slots: list[Tensor],
        greatest_lens: tuple[int, int],
        num_rows: int,
    ) -> Pass:
        metadata: list[Any] = [None] * (self._groups[-1] + 1)
        for group, table, slot_T in zip(self._groups, tables, slots, strict=True):
            metadata[group] = self._backend.build_metadata(
                AttentionBatch(query_starts, seq_lens, table, slot_T, *greatest_lens)
            )
        return Pass(positions_T, ForwardContext(tuple(metadata)), num_rows)
