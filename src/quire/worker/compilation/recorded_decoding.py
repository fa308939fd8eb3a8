"""Steps in which the rows of the last one get a token each, and ask for nothing else, by one call of the library.

What a step does beside its programs takes a millisecond and more where the model has just passed through all caches.
Most steps are of this kind. They are computed here, with the same kernels and so the same bits.

Owns the arguments of the call. Must never change the row table. Called by StepComputation.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.compilation.recorded import RecordedForward, RecordedLogits
from quire.worker.kernels.cpu.decode import DecodeArgs, DecodeCall
from quire.worker.kernels.cpu.program import Program
from quire.worker.row_table import RowTable
from quire.worker.sampler.choose import DrawSettings, choose_tokens


class _Choice:
    """From logits to tokens, as a program."""

    def __init__(self, logits_NV: Tensor, draws: DrawSettings | None) -> None:
        """`draws`: of all rows, looked at in each run; None: all take the greatest logit."""
        self._draws = draws
        # those that the columns of all but the uniform numbers were filled from
        self._filled: Any = None
        self.program = Program()
        with torch.inference_mode(), self.program.recording(len(logits_NV)):
            self.tokens, self.greatest = choose_tokens(logits_NV, draws)
        # with this choice, for some rows
        self.call: DecodeCall | None = None

    def fill(self, draws: DrawSettings) -> None:
        assert self._draws is not None, "it was recorded with draws"
        columns = [field.name for field in fields(draws)]
        if draws.temperature is self._filled:
            # they are the same arrays from step to step while rows neither come nor go
            columns = ["uniform"]
        for name in columns:
            getattr(self._draws, name)[: len(draws.uniform)] = getattr(draws, name)
        # last: a step may be ended between any two lines (patience.py)
        self._filled = draws.temperature


class RecordedDecoding:
    """Of one model over one table."""

    def __init__(self, forward: RecordedForward, logits: RecordedLogits, table: RowTable, block_size: int) -> None:
        self._forward = forward
        self._logits = logits
        self._table = table
        self._block_size = block_size
        self._rows: IntArray = table.num_total[:0]
        self._greatest = _Choice(logits.logits, None)
        self._drawn = _Choice(logits.logits, DrawSettings.greedy(logits.max_rows))

    @classmethod
    def of(cls, model: Any, table: RowTable, block_size: int) -> RecordedDecoding | None:
        """None: this model's steps are no programs, or keep states."""
        forward = model.forward
        logits = getattr(model, "compute_logits", None)
        if not isinstance(forward, RecordedForward) or not isinstance(logits, RecordedLogits):
            return None
        return cls(forward, logits, table, block_size) if forward.reads_tokens_alone else None

    def next_tokens(self, rows: IntArray, draws: DrawSettings | None) -> IntArray | None:
        """The next token of each, the greatest logit's without `draws`; None: one of them has more to compute, or a
        logit is not finite."""
        num_rows = len(rows)
        if num_rows > self._logits.max_rows:
            return None
        choice = self._greatest
        if draws is not None:
            choice = self._drawn
            choice.fill(draws)
        if rows.tobytes() != self._rows.tobytes():
            self._greatest.call = self._drawn.call = None
            self._rows = rows.copy()
        if choice.call is None:
            choice.call = self._call_of(choice)
        return choice.tokens[:num_rows].numpy().copy() if choice.call.run() else None

    def _call_of(self, choice: _Choice) -> DecodeCall:
        table, forward, logits = self._table, self._forward, self._logits
        groups = [forward.decode_group(group, table.block_tables[group]) for group in range(table.num_attention_groups)]
        args = DecodeArgs(
            num_rows=len(self._rows),
            rows=self._rows.ctypes.data,
            token_ids=table.token_ids.ctypes.data,
            token_stride=table.token_ids.shape[1],
            num_computed=table.num_computed.ctypes.data,
            num_total=table.num_total.ctypes.data,
            is_written=table.is_written.ctypes.data,
            adapter_slots=table.adapter_slots.ctypes.data,
            **forward.input_addresses(),
            block_size=self._block_size,
            forward=forward.program.address,
            logits=logits.program.address,
            choice=choice.program.address,
            hidden=forward.hidden.data_ptr(),
            hidden_of_logits=logits.hidden.data_ptr(),
            hidden_bytes=logits.hidden.nbytes // len(logits.hidden),
            greatest=choice.greatest.data_ptr(),
        )
        return DecodeCall(args, groups)
