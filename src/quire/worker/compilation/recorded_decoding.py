"""Steps in which the rows of the last one get tokens, and ask for nothing else, by one call of the library.

What a step does beside its programs takes a millisecond and more where the model has just passed through all caches,
and what the other threads of the engine do between two steps takes as much of the same processors. Most steps are of
this kind. They are computed here, with the same kernels and so the same bits; and where the core lets them, rows get
as many tokens in one step as take a time that whoever reads them would not notice.

Owns the arguments of the call, and where its tokens come to lie. Must never change the row table. Called by
StepComputation.
"""

from __future__ import annotations

from dataclasses import fields
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config import BurstTimes
from quire.messages import IntArray
from quire.worker.compilation.recorded import RecordedForward, RecordedLogits
from quire.worker.kernels.cpu.decode import DecodeArgs, DecodeCall
from quire.worker.kernels.cpu.program import Program
from quire.worker.row_table import RowTable
from quire.worker.sampler.choose import DrawSettings, RowDraws, choose_tokens


class _Choice:
    """From logits to tokens, as a program."""

    def __init__(self, logits_NV: Tensor, draws: DrawSettings | None) -> None:
        """`draws`: of all rows, looked at in each run; None: all take the greatest logit."""
        self._draws = draws
        # what its columns were filled from
        self._filled: RowDraws | None = None
        self.program = Program()
        with torch.inference_mode(), self.program.recording(len(logits_NV)):
            self.tokens, self.greatest = choose_tokens(logits_NV, draws)
        # with this choice, for some rows
        self.call: DecodeCall | None = None

    @property
    def uniform_address(self) -> int:
        return 0 if self._draws is None else self._draws.uniform.ctypes.data

    def fill(self, draws: RowDraws) -> None:
        """All but the uniform numbers, which the call takes for each token anew."""
        assert self._draws is not None, "it was recorded with draws"
        if draws is self._filled:
            return
        columns: tuple[npt.NDArray[Any], ...] = draws.columns
        # the uniform numbers are the last of the fields
        for field, column in zip(fields(DrawSettings), columns, strict=False):
            getattr(self._draws, field.name)[: len(column)] = column
        # last: a step may be ended between any two lines (patience.py)
        self._filled = draws


class RecordedDecoding:
    """Of one model over one table."""

    def __init__(
        self, forward: RecordedForward, logits: RecordedLogits, table: RowTable, block_size: int, times: BurstTimes
    ) -> None:
        self._times = times
        self._forward = forward
        self._logits = logits
        self._table = table
        self._block_size = block_size
        self._rows: IntArray = table.num_total[:0]
        # of each token of a call, those of all rows one after the other
        most = times.most_tokens * logits.max_rows
        self._chosen: IntArray = np.empty(most, dtype=np.int64)
        self._uniforms = np.empty(most)
        # in the last step, whatever rows these were; 0: there was none yet
        self._seconds_of_token = 0.0
        # readable when somebody waits for the end of a step; -1: nobody says so
        self._arrivals = -1
        self._greatest = _Choice(logits.logits, None)
        self._drawn = _Choice(logits.logits, DrawSettings.greedy(logits.max_rows))

    @classmethod
    def of(cls, model: Any, table: RowTable, block_size: int, times: BurstTimes) -> RecordedDecoding | None:
        """None: this model's steps are no programs, or keep states."""
        forward = model.forward
        logits = getattr(model, "compute_logits", None)
        if not isinstance(forward, RecordedForward) or not isinstance(logits, RecordedLogits):
            return None
        return cls(forward, logits, table, block_size, times) if forward.reads_tokens_alone else None

    def next_tokens(self, rows: IntArray, draws: RowDraws | None, most: int) -> IntArray | None:
        """The next tokens, at most so many, [tokens, rows]; the greatest logits' without `draws`. None: one of the rows
        has more to compute, or a logit is not finite."""
        num_rows = len(rows)
        if num_rows > self._logits.max_rows:
            return None
        seconds = 0.0
        if most > 1:
            seconds = self._times.whole if self._table.in_bursts[rows].all() else self._times.streamed
            most = min(most, self._times.most_tokens)
        # the library looks at the clock; here it is about numbers that would be drawn for nothing
        if self._seconds_of_token:
            most = min(most, 1 + int(seconds / self._seconds_of_token))
        choice = self._greatest
        if draws is not None:
            choice = self._drawn
            choice.fill(draws)
            lengths = self._table.num_total[rows] + np.arange(most)[:, None]
            self._uniforms[: lengths.size] = draws.uniforms(lengths).reshape(-1)
        if rows.tobytes() != self._rows.tobytes():
            self._greatest.call = self._drawn.call = None
            self._rows = rows.copy()
        if choice.call is None:
            choice.call = self._call_of(choice)
        begin = perf_counter()
        num_tokens = choice.call.run(most, int(seconds * 1e9))
        if not num_tokens:
            return None
        self._seconds_of_token = (perf_counter() - begin) / num_tokens
        return self._chosen[: num_tokens * num_rows].reshape(num_tokens, num_rows).copy()

    def watch_arrivals(self, descriptor: int) -> None:
        self._arrivals = descriptor
        self._greatest.call = self._drawn.call = None

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
            most_total=table.most_total.ctypes.data,
            stops=table.stops.ctypes.data,
            num_stops=table.stops.shape[1],
            **forward.input_addresses(),
            block_size=self._block_size,
            forward=forward.program.address,
            logits=logits.program.address,
            choice=choice.program.address,
            hidden=forward.hidden.data_ptr(),
            hidden_of_logits=logits.hidden.data_ptr(),
            hidden_bytes=logits.hidden.nbytes // len(logits.hidden),
            greatest=choice.greatest.data_ptr(),
            tokens=choice.tokens.data_ptr(),
            uniform=choice.uniform_address,
            uniforms=self._uniforms.ctypes.data,
            chosen=self._chosen.ctypes.data,
            arrivals=self._arrivals,
        )
        return DecodeCall(args, groups)
