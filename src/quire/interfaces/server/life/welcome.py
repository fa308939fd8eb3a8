"""What a starting server says to the person who started it: where the time went, and a line to try."""

from __future__ import annotations

import json
import shlex
from typing import Any


def try_line(url: str, model: str, *, is_chat: bool, has_key: bool) -> str:
    """A command to paste."""
    body: dict[str, Any]
    if is_chat:
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "What is seven plus five?"}]}
    else:
        path = "/v1/completions"
        body = {"prompt": "Once upon a time", "max_tokens": 32}
    key = """ -H "Authorization: Bearer $API_KEY\"""" if has_key else ""
    data = shlex.quote(json.dumps({"model": model, **body}, ensure_ascii=False))
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {data}"


def welcome(url: str, model: str, *, is_chat: bool, has_key: bool) -> str:
    """The last words of a start-up."""
    line = try_line(url, model, is_chat=is_chat, has_key=has_key)
    return f"\nQuire serves {model} at {url} (Ctrl-C ends it). Open it in a browser, or try:\n\n  {line}\n"
