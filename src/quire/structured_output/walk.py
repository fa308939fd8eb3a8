"""One sequence's way through a grammar.

What it knows is a function of the tokens alone: they are compared with those that were followed so far, and what
differs is taken back. So a fork, a preemption, a row that is given up, and drafts that were wrong need no word of their
own.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.structured_output.grammar import GrammarError, reason_of

Tokens = npt.NDArray[np.int32]
Words = npt.NDArray[np.int32]
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class Walk:
    """`start`: the matcher at the beginning of an output, which is shared and never moved."""

    def __init__(self, start: Future[Any], end_ids: frozenset[int]) -> None:
        self._start = start
        self._end_ids = end_ids
        self._matcher: Any = None
        # what the matcher stands behind
        self._tokens = _NO_TOKENS

    def child(self) -> Walk:
        """Of a fork: it follows its own tokens from the beginning."""
        return Walk(self._start, self._end_ids)

    def fill(self, tokens: Tokens, num_sure: int, mask: Words) -> bool:
        """Writes which token may follow these, a bit for each; False if any may.

        The first num_sure tokens were said; the others are drafts, and a draft that the grammar does not allow may be
        followed by anything, because it will not stand. After an end token nothing matters either. Raises GrammarError
        where the grammar cannot be followed.
        """
        if self._matcher is None:
            self._matcher = self._start.result().deep_copy()
        matcher = self._matcher
        self._take_back_to(_num_common(self._tokens, tokens))
        rest: list[int] = tokens[len(self._tokens) :].tolist()
        num_taken = int(matcher.try_consume_tokens(rest)) if rest else 0
        self._tokens = tokens[: len(self._tokens) + num_taken].copy()
        if num_taken < len(rest) or (num_taken and rest[-1] in self._end_ids):
            place = len(self._tokens)
            if matcher.is_error():
                raise GrammarError(reason_of(matcher))
            if place >= num_sure or not self._end_ids.isdisjoint(tokens[: place + 1].tolist()):
                return False
            raise GrammarError(f"token {rest[num_taken]} was chosen at place {place} of the output, against the mask")
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        return True

    def _take_back_to(self, count: int) -> None:
        num_back = len(self._tokens) - count
        if num_back and not self._matcher.rollback(num_back):
            raise GrammarError(reason_of(self._matcher))
        self._tokens = self._tokens[:count]


def _num_common(left: Tokens, right: Tokens) -> int:
    """How many tokens at the beginning are the same."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
