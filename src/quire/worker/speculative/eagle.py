"""Eagle: a head on the target's hidden states proposes (method=eagle).

The head's input at a position is what the target computed there, so it runs over the tokens of every step, prompts
included, right after the target: nothing is made up for later, and nothing is kept between steps but keys and values
in the blocks of the rows.

    target     positions 5 6 7 of a row         states h5 h6 h7, tokens up to t8 (t8 was sampled)
    head       (h5, t6) (h6, t7) (h7, t8)   ->  t9, then (own state, t9) -> t10, ...

Keys and values of proposals are computed from the head's own states and written again from the target's, once these
are there. In steps in which nobody asks for drafts the head does not run; the positions of these steps are holes, where
the blocks hold whatever was there. Attention over a hole makes proposals worse, never the text: the target verifies
them all.
Must never: change the row table. Called by ModelRunner, as every proposer.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from quire.config import WorkerConfig
from quire.messages import IntArray
from quire.worker.attention import Attention
from quire.worker.capacity import StepCost, measure_largest_step
from quire.worker.input_batch import InputBatch
from quire.worker.platforms import Platform
from quire.worker.speculative.eagle_loader import load_eagle
from quire.worker.speculative.pass_runner import PassRunner, run_alone
from quire.worker.speculative.passes import PassBuilder
from quire.worker.speculative.proposer import FinishedStep, NoProposer, ProposerContext, no_drafts
from quire.worker.staging import to_device


class EagleProposer(NoProposer):
    """Runs the head over each step. Has no state of its own."""

    reads_hidden_states = True

    def __init__(self, config: WorkerConfig, target: nn.Module) -> None:
        self._model, self._taps = load_eagle(config, target)
        self._is_on = True

    @property
    def layers(self) -> dict[str, Attention]:
        return self._model.layers

    def recordable(self, target: nn.Module) -> list[nn.Module]:
        """None: the head reads hidden states from between the target's layers."""
        return []

    def largest_step(self, platform: Platform, config: WorkerConfig) -> StepCost:
        return measure_largest_step(self._model, platform, config)

    def open(self, context: ProposerContext) -> None:
        self._table = context.table
        passes = PassBuilder(self.layers.values(), context.table)
        self._runner = PassRunner(self._model, passes, context.table, context.settings)

    def propose(self, step: FinishedStep) -> IntArray:
        hidden_TE = self._taps.take() if self._taps is not None else step.hidden_TE
        batch = step.batch
        rows_n = step.rows_n
        computed_S = self._seen(batch)
        if not self._is_used(step):
            return no_drafts(len(rows_n))
        counts = np.zeros(self._table.num_rows, dtype=np.int64)
        counts[rows_n] = step.counts_n
        # Rows that draft come first, those with many drafts before those with few.
        order = np.argsort(-counts[batch.rows_S], kind="stable")
        order = order[computed_S[order] > batch.num_computed_S[order]]
        rows = batch.rows_S[order]
        starts = batch.num_computed_S[order]
        ends = computed_S[order]
        index_T = _places(batch.query_starts_S1[order].astype(np.int64), ends - starts)
        if len(index_T) != len(hidden_TE) or (index_T[:-1] > index_T[1:]).any():
            hidden_TE = hidden_TE[to_device([index_T], hidden_TE.device)[0]]
        drafts = self._runner.run(
            rows, starts, ends, counts[rows[: len(rows_n)]], computed_S=starts, shift=1, hidden_TE=hidden_TE
        )
        place = np.empty(self._table.num_rows, dtype=np.int64)
        place[rows[: len(rows_n)]] = np.arange(len(rows_n))
        return drafts[place[rows_n]] if len(rows_n) else no_drafts(0)

    def _seen(self, batch: InputBatch) -> IntArray:
        """So many tokens of each row have states of the target, and one behind them is known. Accepted drafts are among
        them, also where a recurrent state has not absorbed them yet."""
        table = self._table
        rows_S = batch.rows_S
        known_S = np.minimum(table.num_verified(rows_S) - 1, batch.num_computed_S + batch.num_tokens_S)
        return np.maximum(table.num_computed[rows_S], known_S)

    def run_pass(self, num_tokens: int) -> None:
        run_alone(self._model, num_tokens, next(self._model.head.parameters()).device)

    def _is_used(self, step: FinishedStep) -> bool:
        """Not if the last step with rows that sampled gave no drafts at all: then speculation is off, and is free."""
        if len(step.batch.sampling_rows_N):
            self._is_on = len(step.rows_n) > 0
        return self._is_on


def _places(starts_S: IntArray, lengths_S: IntArray) -> IntArray:
    """Of the tokens of these rows among those of the step; what was rejected is left out."""
    ends_S = lengths_S.cumsum()
    return np.arange(ends_S[-1]) + np.repeat(starts_S - (ends_S - lengths_S), lengths_S)
