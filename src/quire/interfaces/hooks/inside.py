"""What a hook asks of the engine is not hooked: it would ask itself without end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_inside: ContextVar[bool] = ContextVar("is_inside_a_hook", default=False)


@contextmanager
def within_a_hook() -> Iterator[None]:
    """Also of what is handed to the event loop from here."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_within_a_hook() -> bool:
    return _is_inside.get()
