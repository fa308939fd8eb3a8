"""What a store is: five calls over names and bytes. It may be slow, and may raise anything: whoever calls it expects
that, and never from a step.

Called by several threads at once. A name is of letters, digits, "/" and "-". A value is written whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StoreState:
    """What a store knows of itself; None: it does not, or asking would cost too much."""

    num_values: int | None = None
    num_bytes: int | None = None


class Store(Protocol):
    def exists_many(self, names: list[str]) -> list[bool]:
        """Of each, whether it is there."""

    def get_many(self, names: list[str]) -> list[bytes | None]:
        """Of each what it holds, or None."""

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        """In the place of what is there. A store that is full gives up what was not read for longest."""

    def delete(self, names: list[str]) -> None:
        """Those that are not there are no error."""

    def stat(self) -> StoreState: ...

    def close(self) -> None: ...
