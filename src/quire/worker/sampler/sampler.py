"""From hidden states to sampled tokens: logits, raw log-probabilities, processors, choice, one way back to the host.

What else is read off a step (`reading.py`) follows the rows by the same hooks, and travels to the host together with
the tokens. A row with drafts is asked at several lengths, and what it says is read off on the host (`verify.py`).
Suffix N counts these questions; without drafts there is one for each row.

Owns the sampling parameters of rows and the logits processors. Must never change the row table: StepComputation does,
with what this returns. A row whose logits are unusable fails alone and gets no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.config.speech_tokens import SpeechTokens
from quire.config.watermark import Watermark
from quire.failpoints import failpoint, is_armed
from quire.messages import NO_INTS, AdmittedSequence, ForkedSequence, IntArray, SchedulerOutput, StepOutput, int_array
from quire.structured_output.grammars import Grammars
from quire.worker.input_batch import InputBatch
from quire.worker.kernels import gather_logits
from quire.worker.row_table import RowTable
from quire.worker.sampler.beside import BesideSteps
from quire.worker.sampler.candidates import read_candidates
from quire.worker.sampler.choose import RowSettings, choose_tokens
from quire.worker.sampler.plan import Positions, SamplingPlan
from quire.worker.sampler.pooling import Pooling
from quire.worker.sampler.processors import LogitsProcessor, RowFeature, built_in_processors
from quire.worker.sampler.processors.token_masks import TokenMasks
from quire.worker.sampler.prompt_logprobs import PromptLogprobs
from quire.worker.sampler.reading import NOT_FINITE, Reading, Sampled, StepReader
from quire.worker.sampler.verify import kept_draws
from quire.worker.staging import Array, to_host
from quire.worker.step_member import StepMember

NOTHING_LEFT = (
    "no token is left to choose from: structured_outputs, allowed_token_ids, bad_words and min_tokens together exclude "
    "all."
)


class Sampler(StepMember):
    """Samples for the rows of a batch whose last token was computed."""

    def __init__(
        self,
        table: RowTable,
        compute_logits: Callable[[Tensor], Tensor],
        grammars: Grammars | None = None,
        *,
        is_alone: bool = True,
        classify: Callable[[Tensor], Tensor] | None = None,
        speech: SpeechTokens | None = None,
        watermark: Watermark | None = None,
    ) -> None:
        """`is_alone`: no other worker samples the same tokens, so time may decide in which step. `classify`: the
        model's head of labels, where it has one. `speech`: what a model that listens may write. `watermark`: of rows
        that are to have it."""
        self._table = table
        self._compute_logits = compute_logits
        self.settings = RowSettings(table.num_rows)
        # of this step: why a processor left a row with nothing, where it knows
        self._reasons: dict[int, str] = {}
        self.beside = BesideSteps(table.num_rows, is_alone=is_alone)
        self._masks = TokenMasks(table.num_rows)
        built_in = built_in_processors(table, grammars, self.beside, self._reasons, speech, watermark)
        self._processors = (self._masks, *built_in)
        self._readers: tuple[StepReader, ...] = (
            PromptLogprobs(table, compute_logits),
            Pooling(table, compute_logits, classify),
        )
        self._features: tuple[RowFeature, ...] = (*self._processors, *self._readers)
        self._has_work_beside = False
        self._room = torch.empty(0)
        # of the last batch; None: rows have come or gone since
        self._plan: SamplingPlan | None = None
        self._plan_key = b""

    def admit(self, sequence: AdmittedSequence) -> None:
        self._forget(sequence.row)
        self.settings.admit(sequence)
        for feature in self._features:
            if feature.parameter_of(sequence) != feature.none:
                feature.admit(sequence)

    def fork(self, fork: ForkedSequence) -> None:
        self._forget(fork.row)
        self.settings.fork(fork)
        for feature in self._features:
            if fork.parent_row in feature.rows:
                feature.fork(fork)

    def release(self, row: int) -> None:
        self._forget(row)

    def _forget(self, row: int) -> None:
        """Whoever had the row has it no more."""
        self._plan = None
        if row in self.beside.jobs:
            self.beside.forget(row)
        for feature in self._features:
            if row in feature.rows:
                feature.release(row)

    def begin(self) -> None:
        """Before forks are applied, which take of the same time."""
        self._has_work_beside = False
        self._begin_work_beside()

    def _begin_work_beside(self) -> None:
        beside = self.beside
        if not self._has_work_beside and (beside.users or beside.jobs or beside.late):
            self._has_work_beside = True
            beside.begin()

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        for row, mask in scheduled.masked.items():
            self._plan = None
            self._masks.replace(row, mask)
        return {}

    def without_waiting(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Those whose next token waits for work that is done beside the steps compute nothing before it is done, unless
        the keys and values of their last token must be written: others may count on them already."""
        self._begin_work_beside()  # for who was admitted in this step
        if not self._has_work_beside:
            return rows, num_tokens
        is_next = self._table.num_total[rows] - self._table.num_computed[rows] == 1
        is_next &= self._table.is_written[rows]
        is_out = self.beside.leave_out(rows, is_next)
        return (rows[~is_out], num_tokens[~is_out]) if is_out.any() else (rows, num_tokens)

    def end(self, scheduled: SchedulerOutput, output: StepOutput) -> None:
        if self._has_work_beside:
            self.beside.end()

    def close(self) -> None:
        self.beside.close()

    def plain_plan(self, rows: IntArray) -> SamplingPlan | None:
        if self._has_work_beside or any(reader.rows for reader in self._readers):
            return None
        plan = self._plan
        return plan if plan is not None and plan.is_plain and self._plan_key == rows.tobytes() else None

    def tokens_read(self, batch: InputBatch) -> Tensor | None:
        return None if any(reader.rows for reader in self._readers) else batch.logits_indices_N

    def sample(self, hidden_TE: Tensor, batch: InputBatch) -> Sampled:
        self._reasons.clear()
        readings: list[Reading] = [reader.start(hidden_TE, batch) for reader in self._readers if reader.rows]
        if len(batch.sampling_rows_N):
            # first, because nothing else counts yet if it cannot be settled
            readings = [*self._chosen(hidden_TE, batch), *readings]
        arrays = iter(to_host([tensor for reading in readings for tensor in reading.tensors]))
        sampled = Sampled()
        for reading in readings:
            reading.settle([next(arrays) for _ in reading.tensors], sampled)
        return sampled

    def _chosen(self, hidden_TE: Tensor, batch: InputBatch) -> Iterator[Reading]:
        # In a step of decoding every token asks, and nothing need be picked out.
        is_whole = hidden_TE.shape[0] == len(batch.sampling_rows_N)
        logits_NV = self._compute_logits(hidden_TE if is_whole else hidden_TE[batch.logits_indices_N])
        if is_armed("nan_row"):
            _spoil(logits_NV, batch.sampling_rows_N, self._table)
        plan = self._plan_for(batch.sampling_rows_N, logits_NV)
        if len(plan.asked):
            # They leave the batch: nothing below is meant for them.
            rows_n = plan.asked_rows_n
            logits_nV = plan.asked.rows_of(logits_NV).float()
            penalise = None
            if plan.asked_processors:
                lengths_n = plan.asked.of(batch.lengths_N)
                penalise = partial(_penalise, plan.asked_processors, rows_n, lengths_n)
            temperature_n = self.settings.temperature[rows_n]
            found = read_candidates(logits_nV, rows_n, plan.num_candidates_n, temperature_n, penalise)
            yield replace(found, late=self._late_among(rows_n), reasons=self._reasons)
        lengths_N = plan.sampled.of(batch.lengths_N)
        logits_NV = plan.sampled.rows_of(logits_NV)
        tokens_N, top_N = self._choose(plan, logits_NV, lengths_N)
        logprobs = [] if plan.logprobs is None else plan.logprobs.read(logits_NV, tokens_N)
        late = self._late_among(plan.rows_N)
        verified = self._table if batch.has_drafts else None
        yield ChosenTokens(plan, lengths_N, [tokens_N, top_N, *logprobs], late, self._reasons, verified)

    def _late_among(self, rows_N: IntArray) -> IntArray:
        """Each once."""
        if not self.beside.late:
            return NO_INTS
        late = self.beside.late.intersection(rows_N.tolist())
        return int_array(sorted(late))

    def _plan_for(self, rows_N: IntArray, logits_NV: Tensor) -> SamplingPlan:
        """The last plan, unless rows have come or gone or stand in the batch otherwise."""
        key = rows_N.tobytes()
        if self._plan is None or key != self._plan_key:
            self._plan = SamplingPlan.of(rows_N, self.settings, self._processors, logits_NV)
            self._plan_key = key
        return self._plan

    def _choose(self, plan: SamplingPlan, logits_NV: Tensor, lengths_N: IntArray) -> tuple[Tensor, Tensor]:
        """Tokens and their greatest logits."""
        settings = None if plan.draws is None else plan.draws.after(lengths_N)
        if not plan.edited:
            return choose_tokens(logits_NV, settings)
        if plan.edited[0].is_all:
            return choose_tokens(self._edited(plan, plan.edited[0], logits_NV, lengths_N), settings)
        tokens_N = torch.empty(len(lengths_N), dtype=torch.int64, device=logits_NV.device)
        top_N = torch.empty(len(lengths_N), dtype=torch.float32, device=logits_NV.device)
        for positions in (plan.untouched, *plan.edited):
            chosen = None if settings is None else settings.select(positions.index)
            if positions is plan.untouched:
                found = choose_tokens(logits_NV, chosen, positions.tensor)
            else:
                found = choose_tokens(self._edited(plan, positions, logits_NV, lengths_N), chosen)
            tokens_N[positions.tensor], top_N[positions.tensor] = found
        return tokens_N, top_N

    def _edited(self, plan: SamplingPlan, positions: Positions, logits_NV: Tensor, lengths_N: IntArray) -> Tensor:
        """Logits of these rows as processors make them: of float32 copies, if they may not be changed themselves."""
        edited_nV = logits_NV if plan.is_in_place else self._copy_of(logits_NV, positions)
        for processor in plan.processors:
            processor.apply(edited_nV, positions.of(plan.rows_N), positions.of(lengths_N))
        return edited_nV

    def _copy_of(self, logits_NV: Tensor, positions: Positions) -> Tensor:
        """In memory that is kept: pages that are new in every step would cost more than the copy."""
        size = len(positions) * logits_NV.shape[1]
        if len(self._room) < size:
            self._room = torch.empty(size, dtype=torch.float32, device=logits_NV.device)
        copy_nV = self._room[:size].view(len(positions), -1)
        gather_logits(logits_NV, positions.tensor, copy_nV)
        return copy_nV


class ChosenTokens:
    """The tokens of one step on their way to the host, each with its greatest logit, and their log-probabilities."""

    def __init__(
        self,
        plan: SamplingPlan,
        lengths_N: IntArray,
        tensors: list[Tensor],
        late: IntArray,
        reasons: dict[int, str],
        drafts: RowTable | None,
    ) -> None:
        """`drafts`: where those stand that the tokens are to verify."""
        self.tensors = tensors
        self._plan = plan
        self._lengths_N = lengths_N
        self._late = late
        self._reasons = reasons
        self._drafts = drafts

    def settle(self, arrays: Sequence[Array], sampled: Sampled) -> None:
        token_ids, top, *logprobs = arrays
        rows_N = self._plan.rows_N
        lengths_N = self._lengths_N
        is_late = np.isin(rows_N, self._late)
        is_failed = ~np.isfinite(top) & ~is_late
        is_kept = ~is_failed & ~is_late
        if self._drafts is not None:
            is_said = kept_draws(self._drafts, rows_N, lengths_N, token_ids)
            # What followed a wrong draft may be as it likes. A row that fails before gets no token at all.
            is_failed &= is_said
            is_kept = is_said & ~is_late & ~np.isin(rows_N, rows_N[is_failed])
        if self._plan.logprobs is not None:
            sampled.output.logprobs = self._plan.logprobs.by_row(logprobs, rows_N, is_kept)
        if not is_kept.all():
            self._fail(rows_N[is_failed], top[is_failed], sampled)
            rows_N = rows_N[is_kept]
            lengths_N = lengths_N[is_kept]
            token_ids = token_ids[is_kept]
        sampled.be_late(self._late)
        sampled.lengths = lengths_N
        sampled.output.rows = rows_N
        sampled.output.token_ids = token_ids

    def _fail(self, rows_N: IntArray, top_N: npt.NDArray[np.float32], sampled: Sampled) -> None:
        for row, value in zip(rows_N.tolist(), top_N.tolist(), strict=True):
            if value == -np.inf:
                sampled.fail(row, self._reasons.get(row, NOTHING_LEFT))
            else:
                sampled.fail(row, NOT_FINITE, is_not_finite=True)


def _penalise(
    processors: tuple[LogitsProcessor, ...], rows_n: IntArray, lengths_n: IntArray, logprobs_nV: Tensor, part: slice
) -> None:
    """Those of a part of these rows."""
    for processor in processors:
        processor.apply(logprobs_nV, rows_n[part], lengths_n[part])


def _spoil(logits_NV: Tensor, rows_N: IntArray, table: RowTable) -> None:
    """The failpoint nan_row, while it is armed: a row whose logits are not finite, to see that it fails alone. Each row
    passes it by itself, and the point sees the tokens of that row."""
    for place, row in enumerate(rows_N.tolist()):
        if failpoint("nan_row", table.tokens_of(row)):
            logits_NV[place] = float("nan")
