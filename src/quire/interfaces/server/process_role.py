"""The role of a process among those that answer HTTP in front of one engine. Mostly it is alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

# A connection's descriptor, and what was read of it; False if it could not be handed on.
HandOn = Callable[[int, bytes], bool]


class Siblings(Protocol):
    """The other processes."""

    async def ask(self, name: str, **arguments: Any) -> list[Any]:
        """What each of them answers. One that does not answer in time is left out."""


class Alone:
    """There is no other process."""

    async def ask(self, name: str, **arguments: Any) -> list[Any]:
        return []


def _all_are(method: bytes, target: bytes) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class ProcessRole:
    """What a process needs to know of the others. Owns none of it."""

    siblings: Siblings = field(default_factory=Alone)
    # to the first process, which alone has what is kept; None: this is the first
    hand_on: HandOn | None = None
    # of a method and a target: whether this process may answer it, and need not hand it on
    is_for_any: Callable[[bytes, bytes], bool] = _all_are

    @property
    def is_first(self) -> bool:
        return self.hand_on is None
