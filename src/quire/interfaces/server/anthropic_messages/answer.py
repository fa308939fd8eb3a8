"""One message while it is made: pieces of an answer become content blocks, and the events that tell of them.

What the events say together is what the whole message says: it is the fold of what they are made of.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.event_stream import StreamDialect, event_bytes
from quire.interfaces.server.openai.responses import Usage
from quire.interfaces.server.openai.work import Work, pieces_of
from quire.interfaces.server.wire.errors import DIALECTS, ApiError, Dialect
from quire.renderer.output_parsing.answer import CallStart, Content, Piece, Reasoning

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % failure_body(error.status, error.message)


DIALECT = StreamDialect(keep_alive=PING, closing=b"", error_event=_error_event)


class MessageAnswer:
    """One message on its way: bytes of events, and the message as it is so far."""

    long_field = "content"
    dialect = DIALECT

    def __init__(self, model: str, work: Work, *, max_tokens: int, hides_thinking: bool) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._work = work
        self.generating = work.generating
        self._max_tokens = max_tokens
        self._hides_thinking = hides_thinking
        self._texts: list[str] | None = None
        self._last: OutputDelta | None = None

    # ------------------------------------------------------------------------------------------ in this order

    def encode(self, delta: OutputDelta) -> bytes:
        """What it adds. With the first it is known how much of the prompt was cached; one that fails before is answered
        with its status."""
        events = []
        if self._last is None:
            # the tokens of this difference are told by the events behind
            self.message["usage"] = {**usage_of(self._work.counts.usage()), "output_tokens": 0}
            events.append(event_bytes({"type": "message_start", "message": self.message}))
        self._last = delta
        events += map(self._added, pieces_of(delta))
        return b"".join(events)

    async def end(self) -> bytes:
        events = self._closed()
        usage = await self._work.usage()
        last = self._last
        assert last is not None
        self.message["stop_reason"] = self._stop_reason(last, usage)
        if self.message["stop_reason"] == "stop_sequence":
            self.message["stop_sequence"] = last.stop_reason
        self.message["usage"] = usage_of(usage)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        events += event_bytes({"type": "message_delta", "delta": delta, "usage": self.message["usage"]})
        return events + event_bytes({"type": "message_stop"})

    def fold(self, delta: OutputDelta) -> None:
        self.encode(delta)

    async def whole(self) -> dict[str, Any]:
        await self.end()
        params = self._work.transfer.params()
        if params is not msgspec.UNSET:
            self.message["kv_transfer_params"] = params
        return self.message

    def _stop_reason(self, last: OutputDelta, usage: Usage) -> str:
        match last.finish_reason:
            case "tool_calls":
                return "tool_use"
            case "length" if usage.completion_tokens < self._max_tokens:
                return "model_context_window_exceeded"
            case "length":
                return "max_tokens"
            case "content_filter":
                return "refusal"
        return "stop_sequence" if isinstance(last.stop_reason, str) else "end_turn"

    # ------------------------------------------------------------------------------------------ blocks

    def _added(self, piece: Piece) -> bytes:
        match piece:
            case CallStart(_, name, call_id):
                return self._opened({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case Content(text):
                events = b"" if self._is_in("text") else self._opened({"type": "text", "text": ""})
                return events + self._difference(_TEXT, text)
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                events = b"" if self._is_in("thinking") else self._opened(block)
                return events if self._hides_thinking else events + self._difference(_THINKING, text)
        return self._difference(_INPUT, piece.text)

    def _is_in(self, kind: str) -> bool:
        return self._texts is not None and self.message["content"][-1]["type"] == kind

    def _opened(self, block: dict[str, Any]) -> bytes:
        events = self._closed()
        self._texts = []
        self.message["content"].append(block)
        return events + event_bytes({"type": "content_block_start", "index": self._index, "content_block": block})

    def _difference(self, template: bytes, text: str) -> bytes:
        assert self._texts is not None
        self._texts.append(text)
        return template % (self._index, msgspec.json.encode(text))

    def _closed(self) -> bytes:
        if self._texts is None:
            return b""
        text = "".join(self._texts)
        self._texts = None
        block = self.message["content"][-1]
        events = b""
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = text
                # clients send it back; thoughts are not signed here, so there is nothing to check
                events = _SIGNATURE % self._index
            case "tool_use":
                block["input"] = _object_in(text)
        return events + event_bytes({"type": "content_block_stop", "index": self._index})

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _object_in(text: str) -> dict[str, Any]:
    """Empty for a call that was cut or is not JSON: then the stop reason is not tool_use."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def usage_of(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens that were read from the cache apart."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
    }


def _delta(kind: bytes, name: bytes) -> bytes:
    head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    return head + b'"delta":{"type":"' + kind + b'","' + name + b'":%b}}\n\n'


_TEXT = _delta(b"text_delta", b"text")
_THINKING = _delta(b"thinking_delta", b"thinking")
_INPUT = _delta(b"input_json_delta", b"partial_json")
_SIGNATURE = _delta(b"signature_delta", b"signature").replace(b"%b", b'""')


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def failure_body(status: int, message: str) -> bytes:
    """{"type": "error", "error": {"type", "message"}}: the type follows from the status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


DIALECTS.append(Dialect("/v1/messages", failure_body, b"request-id"))
