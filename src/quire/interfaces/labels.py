"""Labels that users give their requests, so that they can end them by name. Several requests may bear the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Abort = Callable[[], None]


class Labels:
    """How to end what bears a label, for as long as it runs."""

    def __init__(self) -> None:
        self._aborts_by_label: dict[str, list[Abort]] = {}

    def __len__(self) -> int:
        return len(self._aborts_by_label)

    @contextmanager
    def borne(self, label: str, abort: Abort) -> Iterator[None]:
        aborts = self._aborts_by_label.setdefault(label, [])
        aborts.append(abort)
        try:
            yield
        finally:
            aborts.remove(abort)
            if not aborts and self._aborts_by_label.get(label) is aborts:
                del self._aborts_by_label[label]

    def count(self, label: str) -> int:
        return len(self._aborts_by_label.get(label, ()))

    def abort(self, label: str) -> None:
        for abort in list(self._aborts_by_label.get(label, ())):
            abort()
