"""What a hook asks of the engine is not hooked: it would ask itself without end. Nor is what nobody sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_unhooked: ContextVar[bool] = ContextVar("is_unhooked", default=False)


@contextmanager
def unhooked() -> Iterator[None]:
    """Also of what is handed to the event loop from here."""
    token = _is_unhooked.set(True)
    try:
        yield
    finally:
        _is_unhooked.reset(token)


def is_unhooked() -> bool:
    return _is_unhooked.get()
