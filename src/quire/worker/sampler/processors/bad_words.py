"""bad_words: sequences of tokens that must not appear in the output.

The last token of a sequence is excluded when the output so far ends in those before it. The prompt does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.messages import AdmittedSequence, IntArray, int_array
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import TokenPlaces, User


class BadWords:
    """Words as lists of token ids."""

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def state_of(self, sequence: AdmittedSequence) -> list[list[int]] | None:
        return [word for word in sequence.bad_words_token_ids if word] or None

    def state_of_child(self, parent: list[list[int]]) -> list[list[int]]:
        return parent

    def apply(self, logits_NV: Tensor, users: list[User[list[list[int]]]]) -> None:
        ids = [self._excluded(user.row, user.length, user.state) for user in users]
        TokenPlaces([user.position for user in users], ids, logits_NV).write(-torch.inf)

    def _excluded(self, row: int, length: int, words: list[list[int]]) -> IntArray:
        longest = max(len(word) for word in words) - 1
        start = max(int(self._table.num_prompt[row]), length - longest)
        end_of_output = self._table.token_ids[row, start:length].tolist()
        return int_array([word[-1] for word in words if _ends_in(end_of_output, word[:-1])])


def _ends_in(tokens: list[int], ending: list[int]) -> bool:
    return len(tokens) >= len(ending) and tokens[len(tokens) - len(ending) :] == ending
