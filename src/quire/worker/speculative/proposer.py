"""What a proposer is: an object that guesses the next tokens of rows; and the null object, which never does.

A guess changes how fast a sequence grows, never what it says: the sampler draws every token as it would without drafts
and keeps those that agree (`sampler/verify.py`). So a proposer may be wrong at will, and it may forget. It follows rows
by the hooks of a logits processor and by `set_progress`, and is asked once at the end of every step.

    admit/fork/release/set_progress    differences, before the step, in the order of SchedulerOutput
    propose                            after the step's tokens stand in the row table
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from quire.config import WorkerConfig
from quire.messages import AdmittedSequence, ForkedSequence, IntArray
from quire.worker.attention import Attention
from quire.worker.capacity import StepCost
from quire.worker.input_batch import InputBatch
from quire.worker.platforms import Platform
from quire.worker.row_table import RowTable
from quire.worker.sampler.choose import RowSettings
from quire.worker.sampler.processors import RowFollower


@dataclass(frozen=True)
class ProposerContext:
    """What there is to read once the cache exists. None of it is changed by a proposer."""

    # tokens and the two numbers of every row, block tables included
    table: RowTable
    # settings.draw_settings(rows_n, lengths_n) has the uniform numbers that the target will draw with at these lengths
    settings: RowSettings


@dataclass(frozen=True)
class FinishedStep:
    """A step whose tokens were verified, sampled and written into the row table. Suffix n: rows that may propose."""

    # as the target saw it: batch.num_computed_S is from before the step, table.num_computed from after it. A rejected
    # draft is still in batch.input_ids_T; the table has the token that stands there now.
    batch: InputBatch
    # The target's hidden states of batch.input_ids_T, as compute_logits takes them. Of tokens that sampled nothing they
    # may have any content, unless the proposer `reads_hidden_states`.
    hidden_TE: Tensor
    # Rows that sampled in this step and are asked for drafts; may be empty. Each has exactly one token that is not
    # computed, its last: table.num_computed[row] == table.num_total[row] - 1.
    rows_n: IntArray
    # how many drafts each may have, at least 1
    counts_n: IntArray


class Proposer(RowFollower, Protocol):
    """All hooks; `NoProposer` has what most of them do."""

    # of every token of a step
    reads_hidden_states: bool

    @property
    def layers(self) -> dict[str, Attention]:
        """Attention layers that keep a cache of their own, by name ("draft." and so on)."""
        ...

    def recordable(self, target: nn.Module) -> list[nn.Module]:
        """Models whose forward pass nobody looks into, the target among them."""
        ...

    def largest_step(self, platform: Platform, config: WorkerConfig) -> StepCost | None:
        """What following the largest step needs and takes, for the memory plan; None if that is nothing."""
        ...

    def open(self, context: ProposerContext) -> None:
        """The cache is there, and steps follow. Called once."""
        ...

    def set_progress(self, progress: Sequence[tuple[int, int]]) -> None:
        """Rows go on at another num_computed_tokens: after a preemption, or at a prefix hit."""
        ...

    def propose(self, step: FinishedStep) -> IntArray:
        """Drafts [n, K], -1 after the last one of a row. Called after every step that computed something, so that a
        draft model can follow a prompt chunk by chunk."""
        ...

    def run_pass(self, num_tokens: int) -> None:
        """One pass over so many tokens in a profiling context, to be timed: no row and no cache is touched."""
        ...


class NoProposer:
    """Proposes nothing and keeps nothing."""

    reads_hidden_states = False

    @property
    def layers(self) -> dict[str, Attention]:
        return {}

    def recordable(self, target: nn.Module) -> list[nn.Module]:
        return [target]

    def largest_step(self, platform: Platform, config: WorkerConfig) -> StepCost | None:
        return None

    def open(self, context: ProposerContext) -> None:
        """Nothing to read."""

    def admit(self, sequence: AdmittedSequence) -> None:
        """Nothing is kept."""

    def fork(self, fork: ForkedSequence) -> None:
        """Nothing is kept."""

    def release(self, row: int) -> None:
        """Nothing to free."""

    def set_progress(self, progress: Sequence[tuple[int, int]]) -> None:
        """Nothing is kept."""

    def propose(self, step: FinishedStep) -> IntArray:
        return no_drafts(len(step.rows_n))

    def run_pass(self, num_tokens: int) -> None:
        """Takes no time."""


def no_drafts(num_rows: int) -> IntArray:
    return np.empty((num_rows, 0), dtype=np.int64)
