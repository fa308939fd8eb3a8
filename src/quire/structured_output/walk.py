"""One sequence's way through a grammar.

What it knows is a function of the tokens alone: they are compared with those that were followed so far, and what
differs is taken back. So a fork, a preemption, a row that is given up, and drafts that were wrong need no word of their
own.

A mask is made within the limits EASY, which a step can afford. Where they do not suffice it is made within HARD, beside
the steps, and counted: a request may have so many of these over all its outputs, and then it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.panics import PanicError, panics_are_errors
from quire.structured_output.grammar import Form, GrammarError, reason_of

Tokens = npt.NDArray[np.int32]
Words = npt.NDArray[np.int32]
# fits nothing that can be followed: after it a matcher takes nothing, at no cost
_NO_TOKEN = 2**32 - 1
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
MOST_HARD_MASKS = 512
_FEW_TOKENS = 4
_LOWEST_PRIORITY = 19
# Where masks are hard, so many more tokens are taken to be so before the easy way is tried again, from the beginning.
_LONGEST_GAP = 64


class HardMaskError(Exception):
    """The mask takes more than EASY: `Walk.fill_beside` makes it."""


class Effort:
    """What one request has cost. `seconds` decides nothing but whose turn it is."""

    def __init__(self) -> None:
        self.num_hard_masks = 0
        self.seconds = 0.0
        # what the last copy of a matcher took
        self.copy_seconds = 0.0

    def charge(self) -> None:
        """For a hard mask, before it is made."""
        self.num_hard_masks += 1
        if self.num_hard_masks > MOST_HARD_MASKS:
            raise GrammarError(
                f"its outputs need more than {MOST_HARD_MASKS} masks that are hard to make, because much may follow in "
                "many places. Make the form simpler, or ask for fewer outputs"
            )


class Walk:
    """Of one sequence. `effort` is shared by all of its request."""

    def __init__(self, form: Future[Form], end_ids: frozenset[int], effort: Effort) -> None:
        self._form = form
        self._end_ids = end_ids
        self.effort = effort
        # what the last mask took, for whoever decides where to make the next one
        self.seconds = 0.0
        self._easy: _Follower | None = None
        self._hard: _Follower | None = None
        # behind fewer tokens than these no mask is expected to be easy, and each is counted that was not before
        self._num_hard_tokens = self._num_counted_tokens = 0
        self._gap = 1

    def child(self, *, may_copy: bool = True) -> Walk:
        """Of a fork: it goes on from here, unless this one may just be beginning beside the steps. A copy takes the
        longer the more may follow and the longer the output is; without one (`may_copy`) it follows its output anew."""
        child = Walk(self._form, self._end_ids, self.effort)
        if may_copy and self._easy is not None and self._easy.num_tokens:
            began = time.perf_counter()
            child._easy = self._easy.copy()
            self.effort.copy_seconds = time.perf_counter() - began
        child.seconds, child._gap = self.seconds, self._gap
        child._num_hard_tokens, child._num_counted_tokens = self._num_hard_tokens, self._num_counted_tokens
        return child

    def is_near(self, num_tokens: int) -> bool:
        """Whether it has followed an output up to these tokens, but for a few. One that has lost its row has not."""
        return num_tokens - (self._easy.num_tokens if self._easy is not None else 0) <= _FEW_TOKENS

    def fill(self, tokens: Tokens, num_sure: int, mask: Words) -> bool:
        """Writes which token may follow these, a bit for each; False if any may.

        The first num_sure tokens were said; the others are drafts, and a draft that the grammar does not allow may be
        followed by anything, because it will not stand. After an end token nothing matters either. Raises HardMaskError
        where the mask takes more than a step can afford, GrammarError where the grammar cannot be followed.
        """
        form = self._form.result()
        if len(tokens) < self._num_hard_tokens:
            raise HardMaskError
        return self._fill_easy(form, tokens, num_sure, mask, _IN_STEP)

    def fill_beside(self, tokens: Tokens, num_sure: int, mask: Words) -> bool:
        """The same, whatever it takes. For a thread beside the steps: another one computes, which holds nobody up."""
        form = self._form.result()
        if not self._end_ids.isdisjoint(tokens.tolist()):
            return False
        library = _Beside(form.companion)
        if len(tokens) >= self._num_hard_tokens:
            try:
                return self._fill_easy(form, tokens, num_sure, mask, library)
            except HardMaskError:
                self._gap = min(2 * self._gap, _LONGEST_GAP)
                self._num_hard_tokens = len(tokens) + self._gap
        if len(tokens) >= self._num_counted_tokens:
            self._num_counted_tokens = len(tokens) + 1
            self.effort.charge()
        if self._hard is None:
            self._hard = _Follower(form.hard.deep_copy(), self._end_ids)
        try:
            with panics_are_errors:
                return self._hard.fill(tokens, num_sure, mask, library)
        except (_StoppedError, PanicError) as error:
            form.note(str(error))
            raise GrammarError(f"{error}. Make the form simpler") from None

    def _fill_easy(self, form: Form, tokens: Tokens, num_sure: int, mask: Words, library: _InStep) -> bool:
        if self._easy is None:
            self._easy = _Follower(form.easy.deep_copy(), self._end_ids)
        try:
            with panics_are_errors:
                is_bound = self._easy.fill(tokens, num_sure, mask, library)
        except (_StoppedError, PanicError) as error:
            form.note(str(error))
            self._easy = None  # it takes nothing any more
            raise HardMaskError from None
        self._gap = 1
        return is_bound


class _StoppedError(Exception):
    """The library has stopped at a limit, or at something that it cannot do."""


class _Follower:
    """A matcher and the tokens that it stands behind."""

    def __init__(self, matcher: Any, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._tokens = _NO_TOKENS

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def copy(self) -> _Follower:
        copied = _Follower(self._matcher.deep_copy(), self._end_ids)
        copied._tokens = self._tokens
        return copied

    def fill(self, tokens: Tokens, num_sure: int, mask: Words, library: _InStep) -> bool:
        """As Walk.fill."""
        matcher = self._matcher
        self._take_back_to(_num_common(self._tokens, tokens))
        rest: list[int] = tokens[len(self._tokens) :].tolist()
        num_taken = library.consume(matcher, rest, num_sure - len(self._tokens)) if rest else 0
        self._tokens = tokens[: len(self._tokens) + num_taken].copy()
        if num_taken < len(rest) or (num_taken and rest[-1] in self._end_ids):
            place = len(self._tokens)
            if matcher.is_error():
                raise _StoppedError(reason_of(matcher))
            if not self._end_ids.isdisjoint(tokens[: place + 1].tolist()):
                return False
            # a token at which the lexer reaches its limit looks as if it did not fit
            library.compute_mask(matcher, mask)
            if matcher.is_error():
                raise _StoppedError(reason_of(matcher))
            if place >= num_sure:
                return False
            raise GrammarError(f"token {rest[num_taken]} was chosen at place {place} of the output, against the mask")
        library.compute_mask(matcher, mask)
        if matcher.is_error():
            raise _StoppedError(reason_of(matcher))
        return True

    def _take_back_to(self, count: int) -> None:
        num_back = len(self._tokens) - count
        if num_back and not self._matcher.rollback(num_back):
            raise _StoppedError(reason_of(self._matcher))
        self._tokens = self._tokens[:count]


class _InStep:
    """The library's two calls, in the thread that asks: the quickest way for what is small."""

    def consume(self, matcher: Any, tokens: list[int], num_sure: int) -> int:
        """A matcher follows these tokens as far as the grammar allows. How many; the first num_sure are no drafts."""
        return int(matcher.try_consume_tokens(tokens))

    def compute_mask(self, matcher: Any, mask: Words) -> None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


_IN_STEP = _InStep()


class _Beside(_InStep):
    """The same in a thread of the library's own, which has the lowest priority: one token of an ambiguous output may
    take a while.

    Python's lock is let go meanwhile, and that thread never takes it. So nothing of low priority ever holds the lock,
    which on a busy machine would stop the steps until its turn came. The library computes there only where it has
    several matchers to serve, so a companion comes along, which is spoiled and takes no time.
    """

    def __init__(self, companion: Any) -> None:
        self._companion = companion
        self._executor = _executor()

    def consume(self, matcher: Any, tokens: list[int], num_sure: int) -> int:
        for count, token in enumerate(tokens):
            if count >= num_sure:  # so it would be an error where a draft does not fit
                return count + super().consume(matcher, tokens[count:], 0)
            is_taken, _ = self._executor.consume_token_par([(matcher, token), (self._companion, _NO_TOKEN)])
            if not is_taken:
                return count
        return len(tokens)

    def compute_mask(self, matcher: Any, mask: Words) -> None:
        masks = np.zeros((2, len(mask)), dtype=np.int32)
        both = [(matcher, 0), (self._companion, 1)]
        self._executor.unsafe_compute_mask_ptr(both, masks.ctypes.data, mask.nbytes, len(masks))
        mask[:] = masks[0]


_executors = threading.local()


def _executor() -> Any:
    """Of this thread: where work does not end, another thread takes over, and must not stand behind it."""
    if not hasattr(_executors, "mine"):
        executors: list[Any] = []
        maker = threading.Thread(target=_make_executor, args=(executors,))
        maker.start()
        maker.join()
        [_executors.mine] = executors
    return _executors.mine


def _make_executor(executors: list[Any]) -> None:
    """In a thread of the lowest priority, which the library's thread inherits."""
    from llguidance import LLExecutor

    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    executors.append(LLExecutor(num_threads=1))


def _num_common(left: Tokens, right: Tokens) -> int:
    """How many tokens at the beginning are the same."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
