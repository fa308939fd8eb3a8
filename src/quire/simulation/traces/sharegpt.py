"""The form of ShareGPT: a JSON list of conversations. Each turn that is answered is a request; nobody knows when.

Prompts are what was said before, so turns of a conversation begin alike: with more and more of one content. Tokens are
counted as four bytes of text each: a tokenizer would have to be the model's, and be here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.simulation.arrivals import Arrival
from quire.simulation.traces.table import ReadTrace, TraceError, in_order

_BYTES_PER_TOKEN = 4
_USERS = ("human", "user")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard")


def read(path: Path) -> ReadTrace:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{path}: is no JSON ({error}).") from None
    if not isinstance(conversations, list):
        raise TraceError(f"{path}: must be a list of conversations.")
    table: list[Arrival] = []
    for number, conversation in enumerate(conversations):
        table += _turns(f"{path}, conversation {number + 1}", number, conversation)
    return in_order(path.name, table, has_contents=True)


def _turns(place: str, number: int, conversation: Any) -> Iterator[Arrival]:
    said = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(said, list):
        raise TraceError(f"{place}: has no list `conversations`.")
    num_said = 0
    for turn, message in enumerate(said):
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise TraceError(f"{place}: message {turn + 1} has no text `value`.")
        tokens = max(1, len(message["value"].encode(errors="replace")) // _BYTES_PER_TOKEN)
        if message.get("from") in _ASSISTANTS and num_said:
            yield Arrival(0.0, num_said, tokens, ((number, num_said),))
        elif message.get("from") not in (*_USERS, *_ASSISTANTS, "system"):
            raise TraceError(f"{place}: message {turn + 1} is from {str(message.get('from'))[:20]!r}: who is that?")
        num_said += tokens
