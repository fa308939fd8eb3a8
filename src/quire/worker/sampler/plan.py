"""What the rows of a batch ask of the sampler. Worked out when rows come or go; a decode step looks it up.

Owns nothing of a step: no logits, no lengths. Rows whose next token the core chooses (candidates) are not among
`rows_N`. Made by Sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.sampler.choose import RowDraws, RowSettings, rows_in_slice
from quire.worker.sampler.logprobs import SampledLogprobs
from quire.worker.sampler.processors import LogitsProcessor
from quire.worker.staging import to_device


class Positions:
    """Some rows of a batch, by where they stand in it: on the host and on the device."""

    def __init__(self, index: IntArray, size: int, device: torch.device) -> None:
        self.index = index
        self.is_all = len(index) == size
        self._device = device

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def tensor(self) -> Tensor:
        return to_device([self.index], self._device)[0]

    def of(self, column: IntArray) -> IntArray:
        return column if self.is_all else column[self.index]

    def rows_of(self, logits_NV: Tensor) -> Tensor:
        """The logits at these positions; all of them without a copy."""
        return logits_NV if self.is_all else logits_NV.index_select(0, self.tensor)


@dataclass(frozen=True)
class SamplingPlan:
    """For a batch of rows, in its order."""

    # the rows whose next token the core chooses, and those that sample
    asked: Positions
    sampled: Positions
    asked_rows_n: IntArray
    num_candidates_n: IntArray
    # what changes the log-probabilities of those
    asked_processors: tuple[LogitsProcessor, ...]
    rows_N: IntArray
    # None: every row is greedy
    draws: RowDraws | None
    # None: none are asked for
    logprobs: SampledLogprobs | None
    # Which processors change logits, of which of the rows that sample, in slices, and the other rows. In place: the
    # logits as they come may be changed, because they are float32, of these rows alone, and nobody needs the raw ones.
    processors: tuple[LogitsProcessor, ...]
    edited: tuple[Positions, ...]
    untouched: Positions
    is_in_place: bool

    @cached_property
    def is_plain(self) -> bool:
        """Every row gets a token of the logits as they are, and nothing else is asked for."""
        return not len(self.asked) and not self.edited and self.logprobs is None

    @classmethod
    def of(
        cls, rows_N: IntArray, settings: RowSettings, processors: tuple[LogitsProcessor, ...], logits_NV: Tensor
    ) -> SamplingPlan:
        counts_N = settings.num_candidates[rows_N]
        device = logits_NV.device
        vocab_size = logits_NV.shape[1]
        asked = Positions(np.flatnonzero(counts_N), len(rows_N), device)
        sampled = Positions(np.flatnonzero(counts_N == 0), len(rows_N), device)
        sampled_N = rows_N[sampled.index]
        active = tuple(one for one in processors if one.rows and one.is_active(sampled_N))
        is_edited = np.zeros(len(sampled_N), dtype=np.bool_)
        for processor in active:
            is_edited |= processor.is_used_by(sampled_N)
        size = len(sampled_N)
        edited_n = np.flatnonzero(is_edited)
        has_logprobs = bool((settings.num_logprobs[sampled_N] >= 0).any())
        is_in_place = len(edited_n) == size and logits_NV.dtype == torch.float32 and not has_logprobs
        slices: list[IntArray] = []
        if len(edited_n):
            step = size if is_in_place else rows_in_slice(vocab_size, device)
            slices = [edited_n[start : start + step] for start in range(0, len(edited_n), step)]
        return cls(
            asked=asked,
            sampled=sampled,
            asked_rows_n=rows_N[asked.index],
            num_candidates_n=counts_N[asked.index],
            asked_processors=tuple(
                one for one in processors if one.rows and one.holds_for_beams and one.is_active(rows_N[asked.index])
            ),
            rows_N=sampled_N,
            draws=settings.draws_of(sampled_N),
            logprobs=SampledLogprobs.of(sampled_N, settings, vocab_size, device) if has_logprobs else None,
            processors=active,
            edited=tuple(Positions(index, size, device) for index in slices),
            untouched=Positions(np.flatnonzero(~is_edited), size, device),
            is_in_place=is_in_place,
        )
