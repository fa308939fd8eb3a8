"""What a step computes for some of its rows: inputs, the model, what is sampled and proposed.

Owns the order from inputs to answer. If something raises before `commit`, nothing is counted as computed, and
StepIsolation computes the same rows again in parts. Called by StepIsolation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.failpoints import any_is_armed, failpoint
from quire.messages import AdmittedSequence, ForkedSequence, IntArray, SchedulerOutput, StepOutput, int_array
from quire.observability.step_times import NoStepTimes
from quire.worker.attention import AttentionBackend
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.input_batch import BatchBuilder, InputBatch, attention_context
from quire.worker.platforms import Platform
from quire.worker.row_table import RowTable
from quire.worker.sampler.beside import BesideSteps
from quire.worker.sampler.choose import RowDraws
from quire.worker.sampler.plan import SamplingPlan
from quire.worker.sampler.reading import Sampled
from quire.worker.speculative import Drafting
from quire.worker.state_cache import StateBatch
from quire.worker.step_member import StepMember

NextTokens: TypeAlias = Callable[[IntArray, RowDraws | None, int], IntArray | None]


class NotSampledError(Exception):
    """The model has computed its rows, and the cache holds their tokens; what failed is what came after."""


@dataclass(frozen=True)
class Computed:
    """What was computed, before any of it counts."""

    rows_S: IntArray
    num_tokens_S: IntArray
    sampled: Sampled
    # what the model was called with and gave, for those who draft; None: nobody does
    batch: InputBatch | None = None
    hidden_TE: Tensor | None = None


class StepSampler(Protocol):
    """What becomes of hidden states."""

    # what a next token waits for, and the rows that get none in this step
    beside: BesideSteps

    def plain_plan(self, rows: IntArray) -> SamplingPlan | None:
        """That of the last step, if it was about these rows, and a token of the model's logits is all they ask for."""
        ...

    def tokens_read(self, batch: InputBatch) -> Tensor | None:
        """Those whose hidden states are asked for, in rising order; None: all."""
        ...

    def sample(self, hidden_TE: Tensor, batch: InputBatch) -> Sampled: ...


class ModelInputs(Protocol):
    """Follows the rows, and says what the model is called with."""

    def admit(self, sequence: AdmittedSequence) -> None: ...

    def fork(self, fork: ForkedSequence) -> None: ...

    def release(self, row: int) -> None: ...

    def seen(self, batch: InputBatch) -> InputBatch:
        """The batch as attention is to see it."""
        ...

    def of(self, batch: InputBatch) -> tuple[Tensor, ...]:
        """The arguments of the model."""
        ...

    def positions(self, batch: InputBatch) -> Tensor:
        """Those among them."""
        ...

    def middle(self, row: int, first: int, end: int) -> int:
        """Where these positions of a row may be divided, about the middle; `first`: nowhere."""
        ...

    def statistics(self) -> dict[str, float]: ...


class TokenInputs(StepMember):
    """Of a model that takes text only."""

    def admit(self, sequence: AdmittedSequence) -> None:
        if sequence.media:
            raise ModelError("media: this model takes text only.")

    def fork(self, fork: ForkedSequence) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    def seen(self, batch: InputBatch) -> InputBatch:
        return batch

    def of(self, batch: InputBatch) -> tuple[Tensor, ...]:
        return batch.input_ids_T, batch.positions_T

    def positions(self, batch: InputBatch) -> Tensor:
        return batch.positions_T

    def middle(self, row: int, first: int, end: int) -> int:
        return (first + end) // 2

    def statistics(self) -> dict[str, float]:
        return {"num_images_encoded": 0, "num_image_cache_hits": 0, "image_cache_bytes": 0}


class StepComputation:
    """Over the rows of one model."""

    def __init__(
        self,
        model: nn.Module,
        backend: AttentionBackend | None,
        table: RowTable,
        sampler: StepSampler,
        batches: BatchBuilder,
        drafting: Drafting,
        platform: Platform,
        inputs: ModelInputs | None = None,
        times: NoStepTimes | None = None,
        next_tokens: NextTokens | None = None,
    ) -> None:
        """`next_tokens`: computes rows with one token each and chooses the next ones, at most so many, [tokens, rows],
        or gives None where it cannot."""
        self.model = model
        self.times = times or NoStepTimes()
        self.backend = backend
        self.sampler = sampler
        self.batches = batches
        self._table = table
        self._drafting = drafting
        self._platform = platform
        # of what was computed last and does not count yet
        self._states: StateBatch | None = None
        self._inputs: ModelInputs = inputs or TokenInputs()
        self._next_tokens = next_tokens

    def compute(self, rows: IntArray, num_tokens: IntArray, most: int = 1) -> Computed:
        """These tokens of these rows, and what follows them, at most so many tokens of each. Changes nothing but the
        cache; `commit` or `undo` is next, also where the exception came behind the last line of this."""
        if (computed := self._decoded(rows, num_tokens, most)) is not None:
            return computed
        batch = self._inputs.seen(self.batches.build(rows, num_tokens))
        self._states = batch.states
        failpoint("in_forward", batch.input_ids_T)
        wanted_n = None if self._drafting.proposer.reads_hidden_states else self.sampler.tokens_read(batch)
        with attention_context(batch, self.backend, wanted_n):
            arguments = self._inputs.of(batch)
            self.times.ends("prepare")
            # on a CPU mostly a recorded program in the place of `forward` (compilation/recorded.py)
            hidden_TE = self.model(*arguments)
            self.times.ends("forward")
        try:
            failpoint("before_sample", lambda: np.concatenate([self._table.tokens_of(row) for row in batch.rows_S]))
            sampled = self.sampler.sample(hidden_TE, batch)
            self.times.ends("sample")
            return Computed(batch.rows_S, batch.num_tokens_S, sampled, batch, hidden_TE)
        except Exception as error:
            raise NotSampledError from error

    def _decoded(self, rows: IntArray, num_tokens: IntArray, most: int) -> Computed | None:
        """Steps of the most frequent kind, in one call."""
        if self._next_tokens is None or any_is_armed() or (plan := self.sampler.plain_plan(rows)) is None:
            return None
        self.times.ends("prepare")
        token_ids_KS = self._next_tokens(rows, plan.draws, most)
        if token_ids_KS is None:
            return None
        self.times.ends("forward")
        lengths = self._table.num_total[rows]
        sampled = Sampled()
        num_each = len(token_ids_KS)
        if num_each > 1:
            lengths = (lengths[:, None] + np.arange(num_each)).reshape(-1)
            num_tokens = np.full_like(rows, num_each)
        sampled.lengths = lengths
        sampled.output.rows = rows.repeat(num_each)
        sampled.output.token_ids = token_ids_KS.T.reshape(-1)
        return Computed(rows, num_tokens, sampled)

    def first_half(self, row: int, num_tokens: int) -> int:
        """How many of a row's next tokens may be computed before the others; 0: they cannot be divided."""
        start = int(self._table.num_computed[row])
        return self._inputs.middle(row, start, start + num_tokens) - start

    def undo(self) -> None:
        """What `compute` was asked for does not count: a state has absorbed nothing of it."""
        if self._states is not None:
            self._states.undo()
        self._states = None

    def commit(self, scheduled: SchedulerOutput, computed: Computed) -> StepOutput:
        """The two numbers move, and what was sampled stands in the table. Must not fail half-way: an exception here
        ends the engine."""
        sampled = computed.sampled
        output = sampled.output
        if self._states is not None:
            self._states.forget()
        self._states = None
        self._table.advance(computed.rows_S, computed.num_tokens_S)
        self._table.append(output.rows, sampled.lengths, output.token_ids)
        if output.failures:
            self._table.drop_drafts(int_array(list(output.failures)))
        if len(sampled.late):
            self._table.step_back(sampled.late)
            output.late = sampled.late
        output.step = scheduled.step
        # those of `sampled.late`, and those that were left out of this step
        late_rows = self.sampler.beside.late
        batch, hidden_TE = computed.batch, computed.hidden_TE
        if batch is None or hidden_TE is None:
            if len(output.rows) > len(computed.rows_S):
                output.speculated = self._gone_on(computed)
            return output
        if self._drafting.is_on or scheduled.step_data or late_rows:
            self.times.ends("finish")
            output.speculated = self._drafting.end_step(scheduled, batch, hidden_TE, output.rows, late_rows)
            self.times.ends("draft")
        return output

    def _gone_on(self, computed: Computed) -> IntArray:
        """Where rows stand that have got several tokens, as StepOutput.speculated says it."""
        rows = computed.rows_S
        num_more = computed.num_tokens_S - 1
        return np.stack([rows, self._table.num_computed[rows], self._table.num_total[rows], num_more, num_more])

    def report(self, scheduled: SchedulerOutput) -> IntArray:
        """Where rows stand that had nothing to compute, as StepOutput.speculated says it."""
        return self._drafting.report(scheduled, self.sampler.beside.late)

    def check_model(self) -> None:
        """One token beside all rows and without a cache; raises if not even this can be computed any more."""
        failpoint("in_forward")
        token = torch.zeros(1, dtype=torch.int64, device=self._platform.device)
        with forward_context(profiling_context()):
            self.model(token, token)
        self._platform.synchronize()
