"""The inputs of one step, gathered out of the row table with array operations: no loop over sequences (4.6.2).

Owns nothing that outlives the step. Sequences of the batch stand in the order of SchedulerOutput.rows, their new
tokens one after the other. Called by StepComputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.attention.backend import AttentionBackend, AttentionBatch
from quire.worker.device_tables import device_tables
from quire.worker.forward_context import ForwardContext, forward_context
from quire.worker.row_table import RowTable
from quire.worker.staging import Array, to_device
from quire.worker.state_cache import StateBatch, StateTables


@dataclass(frozen=True)
class InputBatch:
    """What the model, attention and the sampler get of a step. Suffixes: T tokens, S sequences, N sampling rows."""

    rows_S: IntArray
    num_tokens_S: IntArray
    # tokens that were computed before this step
    num_computed_S: IntArray
    # where the tokens of each sequence begin among those of the step
    query_starts_S1: npt.NDArray[np.int32]
    # unverified tokens at the end of each sequence, before this step
    num_drafts_S: IntArray
    has_drafts: bool
    # Where the model's choice is asked for: after every token of this step that is the last of its row, or that a draft
    # follows. A row occurs as often, with rising lengths; its choice stands at that position.
    sampling_rows_N: IntArray
    lengths_N: IntArray
    input_ids_T: Tensor
    positions_T: Tensor
    logits_indices_N: Tensor
    # one for each group of attention layers
    attention: tuple[AttentionBatch, ...]
    # None: the model has no recurrent layers
    states: StateBatch | None
    # of each token the slot of its adapter, -1 for none; None: no token has one
    adapter_slots_T: Tensor | None


@contextmanager
def attention_context(
    batch: InputBatch, backend: AttentionBackend | None, wanted_n: Tensor | None = None
) -> Iterator[None]:
    """The scope in which a model computes this batch; `wanted_n` as in ForwardContext."""
    metadata: tuple[Any, ...] = ()
    if backend is not None:
        metadata = tuple(backend.build_metadata(group) for group in batch.attention)
    context = ForwardContext(metadata, states=batch.states, adapter_slots=batch.adapter_slots_T, wanted_n=wanted_n)
    with forward_context(context):
        yield


class BatchBuilder:
    """Makes the batch of a step."""

    def __init__(
        self, table: RowTable, block_size: int, device: torch.device, states: StateTables | None = None
    ) -> None:
        self._table = table
        self._states = states
        self.block_size = block_size
        self._device = device
        self._device_tables = device_tables(table, device)

    def build(self, rows_S: IntArray, num_tokens_S: IntArray) -> InputBatch:
        """So many tokens of each row, from those on that are computed."""
        table = self._table
        num_computed_S = table.num_computed[rows_S]
        seq_lens_S = num_computed_S + num_tokens_S
        query_starts_S1 = np.zeros(len(rows_S) + 1, dtype=np.int32)
        np.cumsum(num_tokens_S, out=query_starts_S1[1:])
        if len(rows_S) == query_starts_S1[-1]:  # one token each: the common case needs no repetition
            row_T = rows_S
            position_T = num_computed_S
        else:
            row_T = np.repeat(rows_S, num_tokens_S)
            position_T = np.arange(len(row_T)) + np.repeat(num_computed_S - query_starts_S1[:-1], num_tokens_S)
        num_drafts_S = table.num_drafts[rows_S]
        rows_N, lengths_N, indices_N = self._questions(rows_S, seq_lens_S, query_starts_S1, num_drafts_S)
        arrays: list[Array] = [
            table.token_ids[row_T, position_T].astype(np.int64),
            position_T,
            indices_N,
            query_starts_S1,
            seq_lens_S.astype(np.int32),
        ]
        longest = -(-int(seq_lens_S.max()) // self.block_size)
        if self._device_tables is None:
            arrays += self._block_arrays(rows_S, query_starts_S1, row_T, position_T, longest)
        input_ids_T, positions_T, logits_indices_N, starts, seq_lens, *blocks = to_device(arrays, self._device)
        if self._device_tables is not None:
            blocks = self._device_tables.prepare(rows_S, starts, len(row_T), longest, self.block_size)
        attention = tuple(
            AttentionBatch(
                query_starts_S1=starts,
                seq_lens_S=seq_lens,
                block_tables_SM=block_tables,
                slots_T=slots,
                max_query_len=int(num_tokens_S.max()),
                max_seq_len=int(seq_lens_S.max()),
            )
            for block_tables, slots in zip(blocks[0::2], blocks[1::2], strict=True)
        )
        return InputBatch(
            rows_S=rows_S,
            num_tokens_S=num_tokens_S,
            num_computed_S=num_computed_S,
            query_starts_S1=query_starts_S1,
            num_drafts_S=num_drafts_S,
            has_drafts=bool(num_drafts_S.any()),
            sampling_rows_N=rows_N,
            lengths_N=lengths_N,
            input_ids_T=input_ids_T,
            positions_T=positions_T,
            logits_indices_N=logits_indices_N,
            attention=attention,
            states=self._states.build(rows_S, num_tokens_S, starts) if self._states is not None else None,
            adapter_slots_T=self._adapter_slots(rows_S, row_T),
        )

    def _questions(
        self, rows_S: IntArray, seq_lens_S: IntArray, query_starts_S1: Array, num_drafts_S: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """After which tokens of the step another one is chosen: their rows, how many tokens each row has up to there,
        and where they stand in the step."""
        table = self._table
        num_verified_S = table.num_total[rows_S] - num_drafts_S
        is_sampling_S = (seq_lens_S >= num_verified_S) & table.is_final[rows_S] & table.samples[rows_S]
        rows_N = rows_S[is_sampling_S]
        lengths_N = seq_lens_S[is_sampling_S]
        indices_N = query_starts_S1[1:][is_sampling_S].astype(np.int64) - 1
        if not num_drafts_S.any():
            return rows_N, lengths_N, indices_N
        # one for each token from the last verified one to the last of the step
        counts_N = lengths_N - num_verified_S[is_sampling_S] + 1
        back_N = np.repeat(counts_N.cumsum(), counts_N) - np.arange(counts_N.sum()) - 1
        lengths_N = np.repeat(lengths_N, counts_N) - back_N
        indices_N = np.repeat(indices_N, counts_N) - back_N
        return np.repeat(rows_N, counts_N), lengths_N, indices_N

    def _adapter_slots(self, rows_S: IntArray, row_T: IntArray) -> Tensor | None:
        slots = self._table.adapter_slots
        return to_device([slots[row_T]], self._device)[0] if (slots[rows_S] >= 0).any() else None

    def _block_arrays(
        self, rows_S: IntArray, query_starts_S1: Any, row_T: IntArray, position_T: IntArray, longest: int
    ) -> list[Array]:
        """For each group: block tables, trimmed to the longest sequence, and the slot of each token, -1 where nothing
        is to be written."""
        arrays: list[Array] = []
        index_T, offset_T = np.divmod(position_T, self.block_size)
        written_n = query_starts_S1[:-1][self._table.is_written[rows_S]]
        for block_table in self._table.block_tables[: self._table.num_attention_groups]:
            arrays.append(block_table[rows_S, :longest])
            slots_T = block_table[row_T, index_T] * np.int64(self.block_size) + offset_T
            if len(written_n):
                slots_T[written_n] = -1
            arrays.append(slots_T)
        return arrays
