"""The last words of a start-up: where the server is, and a command to paste that its model can answer."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config.model_facts import ModelFacts


@dataclass(frozen=True)
class Example:
    """A request that shows what a kind of model is for."""

    path: str
    body: dict[str, Any]
    # of a form; "": the body is JSON
    file: str = ""


CHAT = Example("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is seven plus five?"}]})
COMPLETION = Example("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32})
LABELS = Example("/v1/classify", {"input": "Once upon a time"})
SPEECH = Example("/v1/audio/transcriptions", {}, file="speech.wav")
VECTORS = Example("/v1/embeddings", {"input": "Once upon a time"})


def example_for(facts: ModelFacts, *, has_chat_template: bool) -> Example:
    by_answer = {"transcripts": SPEECH, "labels": LABELS, "vectors": VECTORS}
    return by_answer.get(facts.makes, CHAT if has_chat_template else COMPLETION)


def try_line(url: str, model: str, example: Example, *, has_key: bool, uds: str | None = None) -> str:
    """A command to paste."""
    key = """ -H "Authorization: Bearer $API_KEY\"""" if has_key else ""
    if example.file:
        form = f"-F model={shlex.quote(model)} -F file=@{example.file}"
        return f"curl{_socket(uds)} {url}{example.path}{key} {form}"
    data = shlex.quote(json.dumps({"model": model, **example.body}, ensure_ascii=False))
    return f"curl{_socket(uds)} {url}{example.path}{key} -H 'Content-Type: application/json' -d {data}"


def _socket(uds: str | None) -> str:
    return "" if uds is None else f" --unix-socket {shlex.quote(uds)}"


def welcome(url: str, model: str, example: Example, *, has_key: bool, uds: str | None = None) -> str:
    line = try_line(url, model, example, has_key=has_key, uds=uds)
    place, ways = (url, "Open it in a browser, or try:") if uds is None else (uds, "Try:")
    return f"\nQuire serves {model} at {place} (Ctrl-C ends it). {ways}\n\n  {line}\n"
