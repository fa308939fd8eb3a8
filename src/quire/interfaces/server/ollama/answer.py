"""One answer while it is made: each line is an object of its own, the last one says `done` and counts.

A call of a tool stands in one line, when it is whole. The whole answer is what all lines say, in the form of the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.event_stream import StreamDialect
from quire.interfaces.server.openai.logprobs import TokenNames, chat_logprobs
from quire.interfaces.server.openai.work import Work, pieces_of
from quire.interfaces.server.wire.errors import DIALECTS, ApiError, Dialect
from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Piece, Reasoning

LINES = "application/x-ndjson"


def failure_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def _error_line(error: ApiError) -> bytes:
    return failure_body(error.status, error.message) + b"\n"


# A space before the next object means nothing; an empty line would be read as one.
DIALECT = StreamDialect(keep_alive=b" ", error_event=_error_line, closing=b"", media_type=LINES)
DIALECTS.append(Dialect("/api", failure_body, takes_unnamed_json=True))


@dataclass(slots=True)
class Said:
    """What a line, or the whole answer, says."""

    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    # number, name, and arguments as JSON
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def add(self, other: Said) -> None:
        self.content += other.content
        self.thoughts += other.thoughts
        self.calls += other.calls
        self.logprobs += other.logprobs


def in_a_chat(said: Said) -> dict[str, Any]:
    """As /api/chat writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said.content)}
    if said.thoughts:
        message["thinking"] = "".join(said.thoughts)
    if said.calls:
        message["tool_calls"] = [
            {"function": {"index": index, "name": name, "arguments": _object_in(arguments)}}
            for index, name, arguments in said.calls
        ]
    return {"message": message}


def in_a_text(said: Said) -> dict[str, Any]:
    """As /api/generate writes it."""
    thoughts = {"thinking": "".join(said.thoughts)} if said.thoughts else {}
    return {"response": "".join(said.content), **thoughts}


class OllamaAnswer:
    """One answer on its way: lines of it, and what was said so far."""

    dialect = DIALECT
    long_field = "logprobs"

    def __init__(self, model: str, work: Work, form: Callable[[Said], dict[str, Any]], num_top: int | None) -> None:
        """`num_top`: best tokens beside each log-probability; None: none are shown."""
        self._model = model
        self._work = work
        self.generating = work.generating
        self._form = form
        self._num_top = num_top
        self._whole = Said()
        # a call whose arguments go on
        self._call: tuple[int, str, list[str]] | None = None
        self._last: OutputDelta | None = None
        self._began = time.perf_counter_ns()
        self._answered: int | None = None

    def encode(self, delta: OutputDelta) -> bytes:
        said = self._read(delta)
        if not (said.content or said.thoughts or said.calls or said.logprobs):
            return b""
        return self._line(said, done=False)

    async def end(self) -> bytes:
        return self._line(Said(), **await self._ending())

    def fold(self, delta: OutputDelta) -> None:
        self._whole.add(self._read(delta))

    async def whole(self) -> dict[str, Any]:
        return self._object(self._whole, **await self._ending())

    def _read(self, delta: OutputDelta) -> Said:
        if self._answered is None and (delta.token_ids or delta.finish_reason):
            self._answered = time.perf_counter_ns()
        self._last = delta
        said = Said()
        for piece in pieces_of(delta):
            self._add(piece, said)
        if delta.finish_reason is not None:
            self._end_call(said)
        if self._num_top is not None and delta.logprobs:
            renderer = self._work.model.renderer
            said.logprobs = list(chat_logprobs(TokenNames(renderer), delta.token_ids, delta.logprobs, self._num_top))
        return said

    def _add(self, piece: Piece, said: Said) -> None:
        match piece:
            case CallArguments(_, text):
                assert self._call is not None
                self._call[2].append(text)
            case CallStart(index, name, _):
                self._end_call(said)
                self._call = (index, name, [])
            case Content(text):
                self._end_call(said)
                said.content.append(text)
            case Reasoning(text):
                self._end_call(said)
                said.thoughts.append(text)

    def _end_call(self, said: Said) -> None:
        if self._call is not None:
            index, name, arguments = self._call
            said.calls.append((index, name, "".join(arguments)))
            self._call = None

    async def _ending(self) -> dict[str, Any]:
        assert self._last is not None
        usage = await self._work.usage()
        now = time.perf_counter_ns()
        answered = self._answered or now
        reason = self._last.finish_reason
        return {
            "done": True,
            "done_reason": "stop" if reason == "tool_calls" else reason,
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": answered - self._began,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - answered,
        }

    def _line(self, said: Said, **rest: Any) -> bytes:
        return msgspec.json.encode(self._object(said, **rest)) + b"\n"

    def _object(self, said: Said, **rest: Any) -> dict[str, Any]:
        logprobs = {"logprobs": said.logprobs} if said.logprobs else {}
        return {"model": self._model, "created_at": now_text(), **self._form(said), **logprobs, **rest}


def now() -> float:
    return time.time()


def now_text() -> str:
    return text_of_time(now())


def text_of_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _object_in(text: str) -> dict[str, Any]:
    """Empty for a call that was cut or is not JSON."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
