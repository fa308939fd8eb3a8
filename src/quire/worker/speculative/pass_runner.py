"""How a model proposes: its passes, and a token after each. What a whole model and a head on the target have in common.

Proposals use the draws that the target will use: greedy rows take the best token, others draw with their own
parameters and the row's uniform number of that position, out of the draft's distribution. Where both distributions
agree, the same number falls into the same token, which is what acceptance asks for. Logits processors (penalties,
masks) are not applied to a draft: what they forbid is proposed in vain, and nothing else comes of it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.messages import IntArray
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.row_table import RowTable
from quire.worker.sampler.choose import DrawSettings, RowSettings, choose_tokens
from quire.worker.speculative.passes import PassBuilder, Passes
from quire.worker.speculative.proposer import no_drafts
from quire.worker.speculative.quick_draw import choose_quickly
from quire.worker.staging import to_device, to_host


class DraftingModel(Protocol):
    """What runs in a pass."""

    @property
    def num_embeddings(self) -> int:
        """Token ids below this have an embedding."""
        ...

    def forward_pass(self, input_ids_T: Tensor, positions_T: Tensor, hidden_TE: Tensor | None) -> Tensor:
        """Hidden states of the tokens. `hidden_TE`: what the target computed of them, in later passes what this did."""
        ...

    def compute_logits(self, hidden_NE: Tensor) -> Tensor:
        """Over tokens of the target and no others, or over those that `target_tokens` takes."""
        ...

    def target_tokens(self, chosen_N: Tensor) -> Tensor:
        """What the target calls the tokens that were chosen."""
        ...


class PassRunner:
    """Runs the passes of a step."""

    def __init__(self, model: DraftingModel, passes: PassBuilder, table: RowTable, settings: RowSettings) -> None:
        self._model = model
        self._passes = passes
        self._table = table
        self._settings = settings

    def run(
        self,
        rows_S: IntArray,
        starts_S: IntArray,
        ends_S: IntArray,
        counts_n: IntArray,
        *,
        computed_S: IntArray,
        shift: int = 0,
        hidden_TE: Tensor | None = None,
    ) -> IntArray:
        """Proposals [n, greatest count], -1 after the last of a row. Counts are positive, never rise, and are those of
        the first rows; of the others tokens are computed and nothing is proposed.

        The input at position i is token i + shift; the last known one stands in for one that is not known yet.
        `computed_S` is what the target had computed before this step.
        """
        plan = self._passes.build(rows_S, starts_S, ends_S, counts_n, computed_S)
        ids = self._first_ids(plan, shift)
        with forward_context(plan.first.context):
            hidden = self._model.forward_pass(ids, plan.first.positions_T, hidden_TE)
        if len(counts_n) == 0:
            return no_drafts(0)
        hidden = hidden[: len(counts_n)] if plan.last_n is None else hidden[plan.last_n]
        draws = self._draws(rows_S, ends_S + shift, [len(counts_n), *(one.num_rows for one in plan.others)])
        proposed = [self._choose(hidden, draws[0])]
        for one, draw in zip(plan.others, draws[1:], strict=True):
            ids = proposed[-1][: one.num_rows]
            with forward_context(one.context):
                hidden = self._model.forward_pass(ids, one.positions_T, hidden[: one.num_rows])
            proposed.append(self._choose(hidden, draw))
        return _as_table(to_host(proposed), len(counts_n))

    def _first_ids(self, plan: Passes, shift: int) -> Tensor:
        position_T = plan.position_T
        if shift:
            position_T = np.minimum(position_T + shift, self._table.num_total[plan.row_T] - 1)
        ids_T = self._table.token_ids[plan.row_T, position_T].astype(np.int64)
        # A padded vocabulary of the target has ids that the draft's embedding lacks.
        np.minimum(ids_T, self._model.num_embeddings - 1, out=ids_T)
        return to_device([ids_T], plan.first.positions_T.device)[0]

    def _draws(self, rows_S: IntArray, lengths_S: IntArray, num_rows_P: list[int]) -> list[DrawSettings | None]:
        """How each pass chooses: with the parameters of its rows and the uniform numbers of its positions."""
        greedy: list[DrawSettings | None] = [None] * len(num_rows_P)
        if not self._settings.temperature[rows_S[: num_rows_P[0]]].any():
            return greedy
        rows = np.concatenate([rows_S[:num_rows] for num_rows in num_rows_P])
        lengths = np.concatenate([lengths_S[:num_rows] + index for index, num_rows in enumerate(num_rows_P)])
        settings = self._settings.draw_settings(rows, lengths)
        assert settings is not None, "a row has a temperature"
        ends = np.cumsum(num_rows_P).tolist()
        return [settings.select(np.arange(end - num_rows, end)) for end, num_rows in zip(ends, num_rows_P, strict=True)]

    def _choose(self, hidden_NE: Tensor, draw: DrawSettings | None) -> Tensor:
        tokens_N = choose_quickly(self._model.compute_logits(hidden_NE).float(), draw)
        return self._model.target_tokens(tokens_N)


def run_alone(model: DraftingModel, num_tokens: int, device: torch.device) -> None:
    """A pass and its choice beside all rows and without a cache, to be timed."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    with forward_context(profiling_context()):
        hidden = model.forward_pass(tokens, tokens, None)
    choose_tokens(model.compute_logits(hidden).float(), None)


def _as_table(proposed: list[IntArray], num_rows: int) -> IntArray:
    table = np.full((num_rows, len(proposed)), -1, dtype=np.int64)
    for index, tokens in enumerate(proposed):
        table[: len(tokens), index] = tokens
    return table
