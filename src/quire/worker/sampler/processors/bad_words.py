"""bad_words: sequences of tokens that must not appear in the output.

The last token of a sequence is excluded when the output so far ends in those before it. The prompt does not count.
Sequences are found by the token that comes before their last one, so that few of them are compared in a step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import TokenPlaces, User


class Words:
    """Which tokens each ending of an output excludes."""

    def __init__(self, words: list[list[int]]) -> None:
        # after whatever
        self.always = int_array(sorted(word[0] for word in words if len(word) == 1))
        # by the last token of the ending, its length, and its tokens
        self._endings: dict[int, dict[int, dict[bytes, list[int]]]] = defaultdict(dict)
        for *ending, excluded in words:
            if ending:
                by_tokens = self._endings[ending[-1]].setdefault(len(ending), {})
                by_tokens.setdefault(np.array(ending, dtype=np.int32).tobytes(), []).append(excluded)

    def excluded_after(self, output: IntArray) -> IntArray:
        by_length = self._endings.get(int(output[-1])) if len(output) else None
        if by_length is None:
            return self.always
        excluded: list[int] = []
        for length, by_tokens in by_length.items():
            if length <= len(output):
                excluded += by_tokens.get(output[-length:].tobytes(), ())
        return np.concatenate([self.always, int_array(excluded)])


class BadWords:
    """Words as lists of token ids."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def state_of(self, sequence: AdmittedSequence) -> Words | None:
        words = [word for word in sequence.bad_words_token_ids if word]
        return Words(words) if words else None

    def state_of_child(self, parent: Words) -> Words:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[Words]]) -> None:
        ids = [user.state.excluded_after(self._output(user)) for user in users]
        TokenPlaces([user.position for user in users], ids, logits_NV).write(-torch.inf)

    def _output(self, user: User[Words]) -> IntArray:
        output: IntArray = self._table.token_ids[user.row, int(self._table.num_prompt[user.row]) : user.length]
        return output
