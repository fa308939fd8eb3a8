"""From hidden states to sampled tokens: logits, raw log-probabilities, processors, choice, one way back to the host.

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
from torch import Tensor

from quire.messages import AdmittedSequence, Candidates, ForkedSequence, IntArray, TokenLogprobs, no_ints
from quire.worker.input_batch import InputBatch
from quire.worker.row_table import RowTable
from quire.worker.sampler.candidates import NOTHING_TO_READ, CandidateReading, read_candidates
from quire.worker.sampler.choose import choose_tokens
from quire.worker.sampler.logprobs import SampledLogprobs
from quire.worker.sampler.processors import RowFollower, built_in_processors
from quire.worker.sampler.prompt_logprobs import PromptLogprobs
from quire.worker.sampler.settings import RowSettings
from quire.worker.sampler.verify import kept_draws
from quire.worker.staging import Array, to_device, to_host

NOT_FINITE = "the model's logits are not finite (NaN or infinity), so no token can be chosen."
NOTHING_LEFT = "no token is left to choose from: allowed_token_ids, bad_words and min_tokens together exclude all."


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
    failures: dict[int, str]


class Sampler:
    """Samples for the rows of a batch whose last token was computed."""

    def __init__(self, table: RowTable, compute_logits: Callable[[Tensor], Tensor]) -> None:
        self._table = table
        self._compute_logits = compute_logits
        self.settings = RowSettings(table.num_rows)
        self._processors = built_in_processors(table)
        self._prompt_logprobs = PromptLogprobs(table, compute_logits)
        self._followers: tuple[RowFollower, ...] = (self.settings, *self._processors, self._prompt_logprobs)

    def admit(self, sequence: AdmittedSequence) -> None:
        for follower in self._followers:
            follower.admit(sequence)

    def fork(self, fork: ForkedSequence) -> None:
        for follower in self._followers:
            follower.fork(fork)

    def release(self, row: int) -> None:
        for follower in self._followers:
            follower.release(row)

    def sample(self, hidden_TE: Tensor, batch: InputBatch) -> Sampled:
        rows_N = batch.sampling_rows_N
        prompt = self._prompt_logprobs.start(hidden_TE, batch)
        if len(rows_N) == 0:
            by_row = prompt.by_row(to_host(prompt.tensors))
            return Sampled(no_ints(), no_ints(), no_ints(), {}, by_row, {}, prompt.failures)
        logits_NV = self._compute_logits(hidden_TE[batch.logits_indices_N]).float()
        rows_N, lengths_N, logits_NV, reading = self._without_candidates(rows_N, batch.lengths_N, logits_NV)
        logprobs = SampledLogprobs(logits_NV, self.settings.num_logprobs[rows_N])
        for processor in self._processors:
            if processor.is_active(rows_N):
                processor.apply(logits_NV, rows_N, lengths_N)
        tokens_N, top_N = choose_tokens(logits_NV, self.settings.draw_settings(rows_N, lengths_N))
        parts = (tokens_N, top_N), logprobs.read(tokens_N), reading.tensors, prompt.tensors
        (token_ids, top), *rest = _to_host_together(parts)
        candidates, failed = reading.by_row(rest[1])
        is_kept = np.isfinite(top)
        is_failed = ~is_kept
        if batch.has_drafts:
            is_said = kept_draws(self._table, rows_N, lengths_N, token_ids)
            # What followed a wrong draft may be as it likes. A row that fails before gets no token at all.
            is_failed &= is_said
            is_kept = is_said & ~np.isin(rows_N, rows_N[is_failed])
        return Sampled(
            rows=rows_N[is_kept],
            lengths=lengths_N[is_kept],
            token_ids=token_ids[is_kept],
            logprobs=logprobs.by_row(rest[0], rows_N, is_kept),
            prompt_logprobs=prompt.by_row(rest[2]),
            candidates=candidates,
            failures=prompt.failures | dict.fromkeys(failed, NOT_FINITE) | _failures(rows_N[is_failed], top[is_failed]),
        )

    def _without_candidates(
        self, rows_N: IntArray, lengths_N: IntArray, logits_NV: Tensor
    ) -> tuple[IntArray, IntArray, Tensor, CandidateReading]:
        """Rows whose next token the core chooses are read and leave the batch: nothing below is meant for them."""
        counts_N = self.settings.num_candidates[rows_N]
        if not counts_N.any():
            return rows_N, lengths_N, logits_NV, NOTHING_TO_READ
        asked, others = np.flatnonzero(counts_N), np.flatnonzero(counts_N == 0)
        rows = rows_N[asked]
        reading = read_candidates(_rows_of(logits_NV, asked), rows, counts_N[asked], self.settings.temperature[rows])
        return rows_N[others], lengths_N[others], _rows_of(logits_NV, others), reading


def _failures(rows: IntArray, top: npt.NDArray[np.float32]) -> dict[int, str]:
    reasons = (NOTHING_LEFT if value == -np.inf else NOT_FINITE for value in top.tolist())
    return dict(zip(rows.tolist(), reasons, strict=True))


def _rows_of(logits_NV: Tensor, positions: IntArray) -> Tensor:
    """The logits at these positions, which rise; all of them without a copy."""
    if len(positions) == len(logits_NV):
        return logits_NV
    return logits_NV[to_device([positions], logits_NV.device)[0]]


def _to_host_together(parts: Sequence[Sequence[Tensor]]) -> list[list[Array]]:
    """Arrays of the tensors of each part; all of them travel at once."""
    arrays = iter(to_host([tensor for part in parts for tensor in part]))
    return [[next(arrays) for _ in part] for part in parts]
