"""From hidden states to sampled tokens: logits, raw log-probabilities, processors, choice, one way back to the host.
Rows that pool get a vector instead (`pooling.py`).

A row with drafts is asked at several lengths, and what it says is read off on the host (`verify.py`). Suffix N counts
these questions; without drafts there is one for each row.

Owns the sampling parameters of rows and the logits processors. Must never change the row table: ModelRunner does, with
what this returns. A row whose logits are unusable fails alone and gets no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.failpoints import failpoint, is_armed
from quire.messages import AdmittedSequence, Candidates, ForkedSequence, IntArray, TokenLogprobs, int_array, no_ints
from quire.structured_output.grammars import Grammars
from quire.worker.input_batch import InputBatch
from quire.worker.kernels import gather_logits
from quire.worker.row_table import RowTable
from quire.worker.sampler import pooling
from quire.worker.sampler.beside import BesideSteps
from quire.worker.sampler.candidates import NOTHING_TO_READ, CandidateReading, read_candidates
from quire.worker.sampler.choose import choose_tokens
from quire.worker.sampler.plan import Positions, SamplingPlan
from quire.worker.sampler.pooling import Pooling
from quire.worker.sampler.processors import RowFollower, built_in_processors
from quire.worker.sampler.prompt_logprobs import PromptLogprobs
from quire.worker.sampler.settings import RowSettings
from quire.worker.sampler.verify import kept_draws
from quire.worker.staging import Array, to_host

NOT_FINITE = "the model's logits are not finite (NaN or infinity), so no token can be chosen."
NOTHING_LEFT = (
    "no token is left to choose from: structured_outputs, allowed_token_ids, bad_words and min_tokens together exclude "
    "all."
)


@dataclass(frozen=True)
class Sampled:
    """Tokens of rows, and what goes with them; candidates are of other rows, which get no token.

    A row stands here once for each token, in order: `lengths` says how many tokens are before each.
    """

    rows: IntArray
    lengths: IntArray
    token_ids: IntArray
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    candidates: dict[int, Candidates]
    # of prompts that were pooled; their rows get no token either
    vectors: dict[int, bytes]
    failures: dict[int, str]
    # rows that computed what they had and get their token later: nothing of them counts
    late: IntArray

    @property
    def counts(self) -> dict[str, int]:
        """As StepOutput has them."""
        not_finite = (NOT_FINITE, pooling.NOT_FINITE)
        num_nan_rows = sum(reason in not_finite for reason in self.failures.values()) if self.failures else 0
        counts = {"num_nan_rows": num_nan_rows, "num_late_rows": len(self.late)}
        return {name: count for name, count in counts.items() if count}

    @property
    def blamed(self) -> list[int]:
        """Rows that failed by what was asked for: the engine could do it, and did."""
        return [row for row, reason in self.failures.items() if reason not in (NOT_FINITE, pooling.NOT_FINITE)]


class Sampler:
    """Samples for the rows of a batch whose last token was computed."""

    def __init__(
        self, table: RowTable, compute_logits: Callable[[Tensor], Tensor], grammars: Grammars | None = None
    ) -> None:
        self._table = table
        self._compute_logits = compute_logits
        self.settings = RowSettings(table.num_rows)
        # of this step: why a processor left a row with nothing, where it knows
        self._reasons: dict[int, str] = {}
        self.beside = BesideSteps(table.num_rows)
        self._processors = built_in_processors(table, grammars, self.beside, self._reasons)
        self._prompt_logprobs = PromptLogprobs(table, compute_logits)
        self._pooling = Pooling(table)
        followers = (self.settings, *self._processors, self._prompt_logprobs, self._pooling)
        self._followers: tuple[RowFollower, ...] = followers
        self._room = torch.empty(0)
        # of the last batch; None: rows have come or gone since
        self._plan: SamplingPlan | None = None
        self._plan_key = b""

    def admit(self, sequence: AdmittedSequence) -> None:
        self._plan = None
        self.beside.forget(sequence.row)
        for follower in self._followers:
            follower.admit(sequence)

    def fork(self, fork: ForkedSequence) -> None:
        self._plan = None
        self.beside.forget(fork.row)
        for follower in self._followers:
            follower.fork(fork)

    def release(self, row: int) -> None:
        self._plan = None
        self.beside.forget(row)
        for follower in self._followers:
            follower.release(row)

    def sample(self, hidden_TE: Tensor, batch: InputBatch) -> Sampled:
        self._reasons.clear()
        prompt = self._prompt_logprobs.start(hidden_TE, batch)
        pooled = self._pooling.start(hidden_TE, batch)
        if len(batch.sampling_rows_N) == 0:
            scores, states = _to_host_together((prompt.tensors, pooled.tensors))
            vectors, spoiled = pooled.by_row(states)
            failures = prompt.failures | spoiled
            return Sampled(
                no_ints(), no_ints(), no_ints(), {}, prompt.by_row(scores), {}, vectors, failures, late=no_ints()
            )
        # In a step of decoding every token asks, and nothing need be picked out.
        is_whole = hidden_TE.shape[0] == len(batch.sampling_rows_N)
        logits_NV = self._compute_logits(hidden_TE if is_whole else hidden_TE[batch.logits_indices_N])
        if is_armed("nan_row"):
            _spoil(logits_NV, batch.sampling_rows_N, self._table)
        plan = self._plan_for(batch.sampling_rows_N, logits_NV)
        rows_N = plan.rows_N
        lengths_N = plan.sampled.of(batch.lengths_N)
        reading = self._candidates(plan, logits_NV)
        logits_NV = plan.sampled.rows_of(logits_NV)
        tokens_N, top_N = self._choose(plan, logits_NV, lengths_N)
        others = plan.logprobs.read(logits_NV, tokens_N), reading.tensors, prompt.tensors
        parts = (tokens_N, top_N), *others, pooled.tensors
        (token_ids, top), *rest = _to_host_together(parts)
        candidates, failed = reading.by_row(rest[1])
        late = self._late_among(rows_N)
        is_late = np.isin(rows_N, late)
        is_failed = ~np.isfinite(top) & ~is_late
        is_kept = ~is_failed & ~is_late
        if batch.has_drafts:
            is_said = kept_draws(self._table, rows_N, lengths_N, token_ids)
            # What followed a wrong draft may be as it likes. A row that fails before gets no token at all.
            is_failed &= is_said
            is_kept = is_said & ~is_late & ~np.isin(rows_N, rows_N[is_failed])
        vectors, spoiled = pooled.by_row(rest[3])
        failures = prompt.failures | spoiled | dict.fromkeys(failed, NOT_FINITE)
        logprobs = plan.logprobs.by_row(rest[0], rows_N, is_kept)
        if not is_kept.all():
            failures |= _failures(rows_N[is_failed], top[is_failed], self._reasons)
            rows_N = rows_N[is_kept]
            lengths_N = lengths_N[is_kept]
            token_ids = token_ids[is_kept]
        by_row = prompt.by_row(rest[2])
        return Sampled(rows_N, lengths_N, token_ids, logprobs, by_row, candidates, vectors, failures, late)

    def _late_among(self, rows_N: IntArray) -> IntArray:
        """Each once."""
        if not self.beside.late:
            return no_ints()
        late = self.beside.late.intersection(rows_N.tolist())
        return int_array(sorted(late))

    def _plan_for(self, rows_N: IntArray, logits_NV: Tensor) -> SamplingPlan:
        """The last plan, unless rows have come or gone or stand in the batch otherwise."""
        key = rows_N.tobytes()
        if self._plan is None or key != self._plan_key:
            self._plan = SamplingPlan.of(rows_N, self.settings, self._processors, logits_NV)
            self._plan_key = key
        return self._plan

    def _candidates(self, plan: SamplingPlan, logits_NV: Tensor) -> CandidateReading:
        """Of the rows whose next token the core chooses. They leave the batch: nothing below is meant for them."""
        if len(plan.asked) == 0:
            return NOTHING_TO_READ
        rows = plan.asked_rows_n
        logits_nV = plan.asked.rows_of(logits_NV).float()
        return read_candidates(logits_nV, rows, plan.num_candidates_n, self.settings.temperature[rows])

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


def _failures(rows: IntArray, top: npt.NDArray[np.float32], reasons: dict[int, str]) -> dict[int, str]:
    pairs = zip(rows.tolist(), top.tolist(), strict=True)
    return {row: reasons.get(row, NOTHING_LEFT) if value == -np.inf else NOT_FINITE for row, value in pairs}


def _to_host_together(parts: Sequence[Sequence[Tensor]]) -> list[list[Array]]:
    """Arrays of the tensors of each part; all of them travel at once."""
    arrays = iter(to_host([tensor for part in parts for tensor in part]))
    return [[next(arrays) for _ in part] for part in parts]


def _spoil(logits_NV: Tensor, rows_N: IntArray, table: RowTable) -> None:
    """The failpoint nan_row, while it is armed: a row whose logits are not finite, to see that it fails alone. Each row
    passes it by itself, and the point sees the tokens of that row."""
    for place, row in enumerate(rows_N.tolist()):
        if failpoint("nan_row", table.tokens_of(row)):
            logits_NV[place] = float("nan")
