"""One decision of the scheduler, and how it is said in words.

Holds no text and no token of anybody: requests are numbers, and a refusal is kept by its kind alone, because the text
that its client gets may quote what the client sent.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

# Beginnings of what a refusal says, and what may be shown of it to others.
_REFUSALS = (
    ("KV cache", "it needs more memory than there is, even alone"),
    ("This model's maximum context length", "its prompt is longer than the model's context"),
    ("n=", "it asks for more sequences than may run at once"),
    ("the prompt is empty", "its prompt is empty"),
    ("token id", "it names a token that the model does not have"),
)
_OTHER_REFUSAL = "its client was told why"

_ENDS = {
    "stop": "ended: the model said all it had to say",
    "length": "ended: it has as many tokens as it may have",
    "abort": "was aborted: its client left, or has what it wanted",
    "error": "failed: its client was told why",
}
_STARTS = {
    "new": "starts",
    "again": "goes on; what it had computed is computed again, as far as the cache lost it",
    "swap": "goes on; its blocks come back from swap space",
}


class Decision(msgspec.Struct, array_like=True, gc=False):
    """What `amount` and `other` count is said in `words`. A request of -1: it is about no request."""

    number: int
    step: int
    time: float
    kind: str
    request: int
    sequence: int = 0
    amount: int = 0
    other: int = 0
    why: str = ""

    def words(self) -> str:
        """One plain sentence, without the full stop."""
        return _WORDS[self.kind](self)


def reason_of_refusal(text: str) -> str:
    return next((said for beginning, said in _REFUSALS if text.startswith(beginning)), _OTHER_REFUSAL)


def plural(count: int, word: str) -> str:
    """3 blocks, 1 block."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _request(decision: Decision) -> str:
    return f"request {decision.request}"


def _sequence(decision: Decision) -> str:
    return f"request {decision.request}" + (f", sequence {decision.sequence}," if decision.sequence else "")


def _arrived(decision: Decision) -> str:
    many = f" and asks for {plural(decision.other, 'sequence')}" if decision.other > 1 else ""
    return f"{_request(decision)} arrived with {plural(decision.amount, 'token')}{many}"


def _turned_away(decision: Decision) -> str:
    unit = {"memory": "block", "rows": "row"}[decision.why]
    needs = f"needs {plural(decision.amount, unit)}, {decision.other:,} can be had"
    return f"{_request(decision)} waits for {'memory' if unit == 'block' else 'a place in the batch'}: it {needs}"


def _preempted(decision: Decision) -> str:
    way = "its blocks go to swap space" if decision.amount else "its tokens will be computed again"
    return f"{_request(decision)} gives way: {decision.why}; {way}"


_WORDS: dict[str, Callable[[Decision], str]] = {
    "arrived": _arrived,
    "refused": lambda one: f"{_request(one)} was refused: {one.why}",
    "turned_away": _turned_away,
    "started": lambda one: f"{_request(one)} {_STARTS[one.why]}",
    "found": lambda one: f"{_sequence(one)} found {one.amount:,} of its {plural(one.other, 'token')} in the cache",
    "fetched": lambda one: f"{_sequence(one)} got {one.amount:,} of its {plural(one.other, 'token')} from elsewhere",
    "preempted": _preempted,
    "displaced": lambda one: f"{_request(one)} gives up its place in the batch as well",
    "forked": lambda one: f"{_sequence(one)} begins as a fork and shares {plural(one.amount, 'block')}",
    "ended": lambda one: f"{_sequence(one)} {_ENDS.get(one.why, 'ended')}",
    "copied": lambda one: f"{plural(one.amount, 'shared block')} copied, because one of the sharers writes into it",
    "evicted": lambda one: f"{plural(one.amount, 'cached block')} of earlier prompts given to those that run",
}
KINDS = tuple(_WORDS)
