"""What other APIs than OpenAI's expect of every answer, also of one that no endpoint has made.

A dialect enters itself when its endpoints are imported; nothing here knows one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Dialect:
    # how its paths begin
    path: str
    # a status and a message, as its clients read them
    error_body: Callable[[int, str], bytes]
    # where its clients look for the request's id, beside the header that all get
    request_id_header: bytes

    def has(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


DIALECTS: list[Dialect] = []


def dialect_of(path: str) -> Dialect | None:
    """None: OpenAI's."""
    return next((dialect for dialect in DIALECTS if dialect.has(path)), None)
