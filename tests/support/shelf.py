"""A store of blocks in memory that a test can stop, lose and spoil."""

from __future__ import annotations

from collections.abc import Callable

from quire.kv_connectors.tiered.stores.store import StoreState


class Shelf:
    """`before_each` is called before anything is asked of it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.num_calls = 0
        self.before_each: Callable[[], object] = lambda: None

    def exists_many(self, names: list[str]) -> list[bool]:
        self._begin()
        return [name in self.values for name in names]

    def get_many(self, names: list[str]) -> list[bytes | None]:
        self._begin()
        return [self.values.get(name) for name in names]

    def put_many(self, values: list[tuple[str, bytes]]) -> None:
        self._begin()
        self.values.update(values)

    def delete(self, names: list[str]) -> None:
        self._begin()
        for name in names:
            self.values.pop(name, None)

    def stat(self) -> StoreState:
        return StoreState(len(self.values))

    def close(self) -> None: ...

    def _begin(self) -> None:
        self.num_calls += 1
        self.before_each()
