"""Where answers end: states that stand inside of a block, for whoever says the same and goes on, as the next turn does.

A checkpoint of a prompt stands at a block boundary, where blocks have names. An answer ends anywhere, so its end has a
name of its own, under which its state is found, and the block that it fills a part of. Nothing is copied for it: the
blocks are those that the sequence lets go of.

    full blocks, by their chain hashes      the end
    | 0 .. 15 | 16 .. 31 |                  | 32 .. 40 |, and the state behind 40 tokens, or 41

While a step is in flight nobody knows whether the state has absorbed its token. A prompt must then have that one, too.

Owned and asked by PrefixCache.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine_core.request import Sequence


@dataclass(frozen=True)
class AnswerEnd:
    """`num_tokens` are absorbed and have their keys and values; perhaps one more is absorbed."""

    name: bytes
    # chain hash of the full blocks before it
    parent: bytes
    num_tokens: int
    # what a prompt must have behind its full blocks, as int32; at most one more than num_tokens
    tokens: bytes
    # what else a block holds than its tokens, and whose it is
    others: bytes

    def begins(self, sequence: Sequence, start: int, others: bytes) -> bool:
        """Whether the tokens of the sequence from `start` on begin like this, and leave one to compute."""
        stop = start + len(self.tokens) // 4
        return (
            self.num_tokens < sequence.num_known_tokens
            and self.others == others
            and sequence.token_ids(start, stop).tobytes() == self.tokens
        )


class AnswerEnds:
    """By name, and by what comes before them."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, AnswerEnd] = {}
        self._by_parent: dict[bytes, list[AnswerEnd]] = {}

    def get(self, name: bytes) -> AnswerEnd | None:
        return self.by_name.get(name)

    def behind(self, parent: bytes) -> list[AnswerEnd]:
        """Those that follow these full blocks."""
        return self._by_parent.get(parent, [])

    def add(self, end: AnswerEnd) -> None:
        self.by_name[end.name] = end
        self._by_parent.setdefault(end.parent, []).append(end)

    def remove(self, end: AnswerEnd) -> None:
        del self.by_name[end.name]
        others = self._by_parent[end.parent]
        others.remove(end)
        if not others:
            del self._by_parent[end.parent]
