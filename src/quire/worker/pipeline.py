"""What a stage of a pipeline does in a step beside its layers: it takes over what the stage before has computed, hands
on what it has computed itself, and hears later what was sampled.

    stage 0     apply  compute  send                                      settle: tokens, drafts
    stage 1                          receive  apply  compute  sample ...... to the core, which tells the others with the
                                                              and draft     next decision

Every stage applies the same decision to rows and blocks of its own, in the same order. What only the last one knows,
what became of the tokens and what it drafts, comes to the others as its answer to the step; a row is in one step at a
time, so nobody needs it before. A row that fails on one stage is not computed on the next ones, and what it should have
written there counts as not written (step_isolation.py).

Owns the steps that are not settled yet. Called by ModelRunner as a member of each step, by StepComputation in the place
of the model's inputs and of the sampler, and by Worker with the answers.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.message_encoding import decode_array, encode_array
from quire.messages import IntArray, SchedulerOutput, StepOutput, int_array
from quire.worker.input_batch import InputBatch
from quire.worker.layers.ranks import StageGroup
from quire.worker.row_table import RowTable
from quire.worker.sampler.plan import SamplingPlan
from quire.worker.sampler.reading import Sampled
from quire.worker.sampler.sampler import Sampler
from quire.worker.step_computation import ModelInputs
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember

_LENGTH_BYTES = 8


class Passed(msgspec.Struct, kw_only=True):
    """What a stage says of a step to the next one, before the tensor itself."""

    step: int
    # of each row that was computed, in the order of the tensor; one that was computed in two halves stands there twice
    rows: np.ndarray
    num_computed: np.ndarray
    num_tokens: np.ndarray
    token_ids: np.ndarray
    # of the tensor's rows
    width: int
    dtype: str
    failures: dict[int, str]
    blamed: list[int]
    counts: dict[str, int]


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_array)
_decoder = msgspec.msgpack.Decoder(Passed, dec_hook=decode_array)


class StageInputs(StepMember):
    """Of a stage that is not the first: receives each step, and gives the model its rows of it."""

    def __init__(self, stages: StageGroup, table: RowTable, inputs: ModelInputs) -> None:
        """`inputs`: what the model is given where it is whole. It says where tokens stand and what they see."""
        self.admit = inputs.admit
        self.fork = inputs.fork
        self.release = inputs.release
        self.seen = inputs.seen
        self.positions = inputs.positions
        self.middle = inputs.middle
        self.statistics = inputs.statistics
        self._stages = stages
        self._table = table
        self._passed: Passed | None = None
        self._tensor = torch.empty(0)
        # where the tokens of each row begin in the tensor, less their position
        self._base = np.zeros(table.num_rows, dtype=np.int64)
        self._isolation: StepIsolation | None = None

    def open(self, isolation: StepIsolation) -> None:
        self._isolation = isolation

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        assert self._isolation is not None
        length = self._stages.receive(torch.empty(1, dtype=torch.int64))
        header = self._stages.receive(torch.empty(int(length), dtype=torch.uint8))
        self._passed = passed = _decoder.decode(header.numpy().tobytes())
        shape = int(passed.num_tokens.sum()), passed.width
        self._tensor = self._stages.receive(torch.empty(shape, dtype=getattr(torch, passed.dtype)))
        self._base[passed.rows[::-1]] = (passed.num_tokens.cumsum() - passed.num_tokens - passed.num_computed)[::-1]
        for row in passed.failures:
            self._isolation.fail(row)
        self._check(scheduled, passed)
        return dict(passed.failures)

    def of(self, batch: InputBatch) -> tuple[Any, ...]:
        passed = self._passed
        assert passed is not None
        tensor = self._tensor
        if not (_are_same(batch.rows_S, passed.rows) and _are_same(batch.num_tokens_S, passed.num_tokens)):
            row_T = np.repeat(batch.rows_S, batch.num_tokens_S)
            tensor = tensor[torch.from_numpy(self._base[row_T]) + batch.positions_T]
        return batch.input_ids_T, self.positions(batch), None, tensor

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        assert self._passed is not None
        output.blamed = [*self._passed.blamed, *output.blamed]
        for name, count in self._passed.counts.items():
            output.counts[name] = output.counts.get(name, 0) + count
        self._passed = None
        self._tensor = torch.empty(0)

    def _check(self, scheduled: SchedulerOutput, passed: Passed) -> None:
        """The stage before has computed what this one knows of: the same tokens of the same rows."""
        table = self._table
        rows, num_tokens = table.granted(scheduled.rows, scheduled.num_tokens)
        difference = np.zeros(table.num_rows, dtype=np.int64)
        difference[rows] = num_tokens
        np.subtract.at(difference, passed.rows, passed.num_tokens)
        difference[list(passed.failures)] = 0
        row_T = np.repeat(passed.rows, passed.num_tokens)
        position_T = np.arange(len(row_T)) - self._base[row_T]
        is_other = passed.step != scheduled.step or difference.any()
        if is_other or (table.token_ids[row_T, position_T] != passed.token_ids).any():
            raise EngineError(
                f"stage {self._stages.rank} knows other tokens in step {scheduled.step} than the stage before."
            )


class StageOutputs(StepMember):
    """Of a stage that is not the last: stands in the place of the sampler, and samples nothing."""

    def __init__(self, stages: StageGroup, table: RowTable, sampler: Sampler) -> None:
        """`sampler`: what it is told of rows decides which of them can be computed, on every stage alike."""
        self.beside = sampler.beside
        self._stages = stages
        self._table = table
        # of the step that is computed: what was, in parts
        self._parts: list[tuple[InputBatch, Tensor]] = []
        # by step whose answer is not known yet: rows that were let go of since, or have another sequence
        self._gone: dict[int, set[int]] = {}

    def plain_plan(self, rows: IntArray) -> SamplingPlan | None:
        return None

    def tokens_read(self, batch: InputBatch) -> Tensor | None:
        """The next stage reads all."""
        return None

    def sample(self, hidden_TE: Tensor, batch: InputBatch) -> Sampled:
        # a copy: a recorded program computes the next part in the same memory
        self._parts.append((batch, hidden_TE.clone()))
        return Sampled()

    def begin(self) -> None:
        self._parts = []

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        placed = [one.row for one in scheduled.admitted] + [one.row for one in scheduled.forked]
        for gone in self._gone.values():
            gone.update(scheduled.released, placed)
        return {}

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        parts = self._parts
        self._parts = []
        if parts:
            self._gone[scheduled.step] = set()
        tensor = torch.cat([tensor for _, tensor in parts]) if parts else torch.empty(0, 0)
        passed = Passed(
            step=scheduled.step,
            rows=_joined([batch.rows_S for batch, _ in parts]),
            num_computed=_joined([batch.num_computed_S for batch, _ in parts]),
            num_tokens=_joined([batch.num_tokens_S for batch, _ in parts]),
            token_ids=_joined([batch.input_ids_T.numpy() for batch, _ in parts]),
            width=tensor.shape[1],
            dtype=str(tensor.dtype).removeprefix("torch."),
            failures=output.failures,
            blamed=output.blamed,
            counts=output.counts,
        )
        header = torch.frombuffer(bytearray(_encoder.encode(passed)), dtype=torch.uint8)
        self._stages.send(torch.tensor([len(header)]))
        self._stages.send(header)
        self._stages.send(tensor)

    def settle(self, answer: StepOutput) -> None:
        """What the last stage said to a step. Rows that have changed hands since are none of its business any more."""
        gone = self._gone.get(answer.step)
        # a step to try the model out is never answered to
        self._gone = {step: rows for step, rows in self._gone.items() if step > answer.step}
        if gone is None:
            return
        table = self._table
        rows, token_ids = _without(gone, np.stack([answer.rows, answer.token_ids]))
        table.append(rows, table.num_verified(rows) + _numbers_of_each(rows), token_ids)
        table.drop_drafts(_without(gone, int_array(list(answer.failures))))
        table.step_back(_without(gone, answer.late))
        rows, drafts = _without(gone, answer.drafts)
        table.set_drafts(rows, _numbers_of_each(rows), drafts)


class StageAnswer(StepMember):
    """Of the last stage: what it drafts, the others compute in a later step."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        output.drafts = self._table.drafts_of(np.setdiff1d(scheduled.rows, list(output.failures)))


def _without(gone: set[int], columns: Any) -> Any:
    """Those of other rows; the first of several columns has the rows."""
    rows = columns[0] if columns.ndim > 1 else columns
    return columns[..., ~np.isin(rows, int_array(list(gone)))]


def _are_same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and bool((left == right).all())


def _joined(columns: list[Any]) -> Any:
    return np.concatenate([int_array([]), *columns])


def _numbers_of_each(rows: Any) -> Any:
    """0, 1, 2 ... for the entries of each row, which stand together."""
    if not len(rows):
        return rows
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
