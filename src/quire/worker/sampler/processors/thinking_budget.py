"""thinking_token_budget: after so many tokens of thoughts nothing but their closing mark may follow.

What counts is all that stands between marks in the output. A thought may have begun in the prompt; if the model opens
another one when the budget is used up, it is closed at once. Once an output has so many tokens, it and its prompt are
looked through in each step: drafts leave no trace, and a few thousand tokens take microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.thought_marks import ThoughtMarks
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import TokenPlaces, User
from quire.worker.staging import to_device

# of a token that is the only one left: any finite number
_CERTAIN = 0.0


@dataclass
class Budget:
    """Of one sequence."""

    num_tokens: int
    marks: ThoughtMarks
    # prompts are long and change seldom: how long one was when it was looked through, and whether it ends in a thought
    _seen: tuple[int, bool] = (-1, False)

    def is_open_after(self, prompt: IntArray) -> bool:
        if self._seen[0] != len(prompt):
            self._seen = len(prompt), _is_open(prompt, self.marks)
        return self._seen[1]


class ThinkingBudget:
    """Closes thoughts that have become too long. A form has no thoughts in it, so none is looked for."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def state_of(self, sequence: AdmittedSequence) -> Budget | None:
        budget = sequence.sampling.thinking_token_budget
        marks = sequence.thought_marks
        if budget is None or marks is None or sequence.sampling.structured_outputs is not None:
            return None
        return Budget(budget, marks)

    def state_of_child(self, parent: Budget) -> Budget:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Budget]]) -> None:
        over = [user for user in users if self._is_over(user)]
        if over:
            positions = [user.position for user in over]
            [index] = to_device([int_array(positions)], logits_NV.device)
            logits_NV.index_fill_(0, index, -torch.inf)
            TokenPlaces(positions, [int_array([user.state.marks.closing]) for user in over], logits_NV).write(_CERTAIN)

    def _is_over(self, user: User[Budget]) -> bool:
        tokens = self._table.token_ids[user.row]
        num_prompt = int(self._table.num_prompt[user.row])
        if user.length - num_prompt < user.state.num_tokens:
            # not so many tokens at all
            return False
        is_open = user.state.is_open_after(tokens[:num_prompt])
        num_thoughts = _num_thoughts(tokens[num_prompt : user.length], user.state.marks, is_open=is_open)
        return num_thoughts is not None and num_thoughts >= user.state.num_tokens


def _is_open(prompt: IntArray, marks: ThoughtMarks) -> bool:
    """Whether the prompt ends inside a thought."""
    last = np.flatnonzero((prompt == marks.opening) | (prompt == marks.closing))[-1:]
    return marks.is_always_open or bool((prompt[last] == marks.opening).any())


def _num_thoughts(output: IntArray, marks: ThoughtMarks, *, is_open: bool) -> int | None:
    """How many tokens of an output that ends inside a thought are thoughts; None: it does not end inside one."""
    places = np.flatnonzero((output == marks.opening) | (output == marks.closing))
    is_opening = output[places] == marks.opening
    was_open = np.concatenate([[is_open], is_opening[:-1]])[: len(places)]
    # an opening mark inside a thought, and a closing one outside, are tokens like any other
    num_tokens = int(places[~is_opening & was_open].sum()) - int((places[is_opening & ~was_open] + 1).sum())
    is_open_now = is_opening[-1] if len(places) else is_open
    return num_tokens + len(output) if is_open_now else None
