"""What an encoder is given of a step: whole sequences whose tokens see each other, and of which text a token is.

Owns where the second text of each row begins. Keys and values of a step lie in blocks of their own, sequence by
sequence, and live no longer than a layer's call: what a sequence gets does not depend on the others. Called by
StepComputation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import AdmittedSequence, ForkedSequence
from quire.worker.attention import Attention, AttentionBatch
from quire.worker.attention.backend import STEP_BLOCK
from quire.worker.input_batch import InputBatch
from quire.worker.staging import to_device
from quire.worker.step_member import StepMember


class EncoderRows(StepMember):
    """Of a model whose attention layers are not causal."""

    def __init__(self, layers: list[Attention], num_rows: int, device: torch.device) -> None:
        self._device = device
        # positions from which on a row's tokens are those of its second text; 0: there is one text
        self._second_starts = np.zeros(num_rows, dtype=np.int64)
        # layers of one window share a description of the step, as groups with a cache do
        self._windows = sorted({layer.sliding_window for layer in layers})
        for layer in layers:
            layer.group = self._windows.index(layer.sliding_window)

    def admit(self, sequence: AdmittedSequence) -> None:
        if sequence.media:
            raise ModelError("media: this model takes text only.")
        self._second_starts[sequence.row] = sequence.second_start

    def fork(self, fork: ForkedSequence) -> None:
        self._second_starts[fork.row] = self._second_starts[fork.parent_row]

    def release(self, row: int) -> None:
        pass

    def seen(self, batch: InputBatch) -> InputBatch:
        if batch.num_computed_S.any():
            raise ModelError("a step has a part of a sequence whose tokens see each other.")
        lengths_S = batch.num_tokens_S
        num_blocks_S = -(-lengths_S // STEP_BLOCK)
        first_S = np.cumsum(num_blocks_S) - num_blocks_S
        tables_SM = first_S[:, None] + np.arange(num_blocks_S.max())
        position_T = np.arange(lengths_S.sum()) - np.repeat(batch.query_starts_S1[:-1], lengths_S)
        end_T = np.repeat(lengths_S, lengths_S)
        slots_T = np.repeat(first_S * STEP_BLOCK, lengths_S) + position_T
        seen = [np.minimum(end_T, position_T + window) if window else end_T for window in self._windows]
        arrays = [lengths_S, tables_SM, *seen]
        as_int32 = [np.ascontiguousarray(array, dtype=np.int32) for array in arrays]
        slots, starts, seq_lens, tables, *ends = to_device(
            [slots_T.astype(np.int64), batch.query_starts_S1, *as_int32], self._device
        )
        longest = int(lengths_S.max())
        groups = tuple(
            AttentionBatch(
                query_starts_S1=starts,
                seq_lens_S=seq_lens,
                block_tables_SM=tables,
                slots_T=slots,
                max_query_len=longest,
                max_seq_len=longest,
                ends_T=ends_of_window,
                num_step_blocks=int(num_blocks_S.sum()),
            )
            for ends_of_window in ends
        )
        return replace(batch, attention=groups)

    def of(self, batch: InputBatch) -> tuple[Tensor, ...]:
        starts_S = self._second_starts[batch.rows_S]
        if not starts_S.any():
            return batch.input_ids_T, batch.positions_T
        starts_T = np.repeat(np.where(starts_S > 0, starts_S, np.iinfo(np.int64).max), batch.num_tokens_S)
        [second] = to_device([starts_T], self._device)
        return batch.input_ids_T, batch.positions_T, (batch.positions_T >= second).long()

    def positions(self, batch: InputBatch) -> Tensor:
        return batch.positions_T

    def middle(self, row: int, first: int, end: int) -> int:
        """A sequence cannot be divided."""
        return first

    def statistics(self) -> dict[str, float]:
        return {"num_images_encoded": 0, "num_image_cache_hits": 0, "image_cache_bytes": 0}
