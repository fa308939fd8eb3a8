"""Prompt look-up: the last tokens of a row occurred in it before, so what followed them then may follow now.

The longest suffix counts, from `longest` tokens down to `shortest`, and of its occurrences the most recent one. Text
that repeats itself with a period shorter than the drafts goes on repeating:

    tokens     a b c d e f a b                  a b a b a b
    found      . b .                            . . . b .          (suffix a b)
    drafts     c d e f a b c d                  a b a b a b a b

Nothing is kept. Comparing all tokens of a row with its last one, and looking at the places, takes 4 to 8 us at 10,000
tokens, up to 40 us where every fiftieth token is the same. Of the places only the last few thousand are looked at: in
131,072 equal tokens all of them would take 2.6 ms, for each row and step. A dictionary of a row's n-grams answers
within 20 us (three lengths, one new token), but takes 15 ms for the prompt and megabytes for each row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.messages import IntArray
from quire.worker.row_table import RowTable
from quire.worker.speculative.proposer import FinishedStep, NoProposer, ProposerContext

# where the last token of a row has stood before
_MOST_PLACES = 4096


class NgramProposer(NoProposer):
    """Looks at rows that are asked for drafts, and at no others."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._table: RowTable

    def open(self, context: ProposerContext) -> None:
        self._table = context.table

    def propose(self, step: FinishedStep) -> IntArray:
        drafts_nK = np.full((len(step.rows_n), int(step.counts_n.max(initial=0))), -1, dtype=np.int64)
        totals_n = self._table.num_total[step.rows_n]
        columns = step.rows_n.tolist(), totals_n.tolist(), step.counts_n.tolist()
        for n, (row, num_tokens, count) in enumerate(zip(*columns, strict=True)):
            tokens = self._table.token_ids[row, :num_tokens]
            start = place_after_match(tokens, self._shortest, self._longest)
            if start is not None:
                drafts_nK[n, :count] = tokens[start + np.arange(count) % (num_tokens - start)]
        return drafts_nK


def place_after_match(tokens: npt.NDArray[np.int32], shortest: int, longest: int) -> int | None:
    """Where the text goes on after the longest, then most recent, earlier occurrence of the last tokens."""
    suffix = tokens[-longest:].tolist()
    ends = np.flatnonzero(tokens[:-1] == suffix[-1])[-_MOST_PLACES:]
    found = None
    for length in range(1, len(suffix) + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == suffix[-length]]
        if len(ends) == 0:
            break
        if length >= shortest:
            found = int(ends[-1]) + 1
    return found
