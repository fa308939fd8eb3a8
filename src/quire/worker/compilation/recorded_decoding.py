"""Steps in which the rows of the last one get a token each, that with the greatest logit, by one call of the library.

What a step does beside its programs takes a millisecond where the model has just passed through all caches, which is a
tenth of the time of a token of few bits. Most steps are of this kind: the same rows, a token each, and nobody asks for
more than the token. They are computed here, with the same kernels and so the same bits.

Owns the arguments of the call. Must never change the row table. Called by StepComputation.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.messages import IntArray
from quire.worker.compilation.recorded import RecordedForward, RecordedLogits
from quire.worker.kernels import operators
from quire.worker.kernels.cpu.decode import DecodeArgs, DecodeCall
from quire.worker.kernels.cpu.program import Program
from quire.worker.row_table import RowTable


class RecordedDecoding:
    """Of one model over one table."""

    def __init__(self, forward: RecordedForward, logits: RecordedLogits, table: RowTable, block_size: int) -> None:
        self._forward = forward
        self._logits = logits
        self._table = table
        self._block_size = block_size
        self._choice = Program()
        with torch.inference_mode(), self._choice.recording(len(logits.logits)):
            self._tokens, self._greatest = operators.best_tokens(logits.logits)
        # those of the call
        self._rows: IntArray = table.num_total[:0]
        self._call: DecodeCall | None = None

    @classmethod
    def of(cls, model: Any, table: RowTable, block_size: int) -> RecordedDecoding | None:
        """None: this model's steps are no programs, or keep states."""
        forward = model.forward
        logits = getattr(model, "compute_logits", None)
        if not isinstance(forward, RecordedForward) or not isinstance(logits, RecordedLogits):
            return None
        return cls(forward, logits, table, block_size) if forward.reads_tokens_alone else None

    def next_tokens(self, rows: IntArray) -> IntArray | None:
        """The next token of each; None: one of them has more to compute, or a logit is not finite."""
        num_rows = len(rows)
        if num_rows > self._logits.max_rows:
            return None
        if self._call is None or rows.tobytes() != self._rows.tobytes():
            self._rows = rows.copy()
            self._call = self._call_of_rows()
        if not self._call.run():
            return None
        return self._tokens[:num_rows].numpy().copy()

    def _call_of_rows(self) -> DecodeCall:
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
            choice=self._choice.address,
            hidden=forward.hidden.data_ptr(),
            hidden_of_logits=logits.hidden.data_ptr(),
            hidden_bytes=logits.hidden.nbytes // len(logits.hidden),
            greatest=self._greatest.data_ptr(),
        )
        return DecodeCall(args, groups)
