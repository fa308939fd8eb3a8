"""One bad input: what is sent, and what a server may answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Case:
    """`body` is sent as it is; `raw` replaces the whole request, head included."""

    name: str
    path: str = COMPLETIONS
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: JSON)
    allowed: tuple[int, ...] = (400,)
    raw: bytes | None = None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)})"


def chat(name: str, /, *, allowed: tuple[int, ...] = (400,), **fields: Any) -> Case:
    """A chat that would be right without these fields."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    return Case(f"chat: {name}", CHAT, json.dumps(body).encode(), allowed=allowed)


def completion(name: str, /, *, allowed: tuple[int, ...] = (400,), **fields: Any) -> Case:
    """The same for a completion."""
    body = {"prompt": "Hi", "max_tokens": 2, **fields}
    return Case(f"completion: {name}", COMPLETIONS, json.dumps(body).encode(), allowed=allowed)


def each(make: Any, name: str, values: list[Any], **others: Any) -> list[Case]:
    """One case a value of one field."""
    return [make(f"{name}={shown(value)}", **{name: value}, **others) for value in values]
