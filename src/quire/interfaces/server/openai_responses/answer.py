"""One response while it is made: pieces of an answer become output items, and the events that tell of them.

What the events say together is what the whole response says: it is the fold of what they are made of. Owns the order of
events and their numbers. A difference of text costs one JSON string and one formatting; everything else is encoded once
an item.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.event_stream import StreamDialect, event_bytes
from quire.interfaces.server.openai.chunks import obfuscation
from quire.interfaces.server.openai.logprobs import TokenNames, chat_logprobs
from quire.interfaces.server.openai.rendering import text_of
from quire.interfaces.server.openai.responses import TokenLogprob, Usage
from quire.interfaces.server.openai.work import Work, pieces_of
from quire.interfaces.server.openai_responses.items import Item, item_id
from quire.interfaces.server.openai_responses.objects import RawMessage
from quire.interfaces.server.services import ResponseStore
from quire.interfaces.server.wire.errors import ApiError
from quire.interfaces.server.wire.json_answer import JsonArray
from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Piece, Reasoning


class ResponseAnswer:
    """One response on its way: bytes of events, and the response as it is so far."""

    long_field = "output"

    def __init__(
        self,
        head: dict[str, Any],
        work: Work,
        items: list[Item],
        stored: ResponseStore,
        *,
        num_top: int = 0,
        is_padded: bool = False,
        is_background: bool = False,
        shows_messages: bool = False,
    ) -> None:
        """head: the response's fields that are certain from the beginning. items: of its own input. is_padded: deltas
        hide their lengths. is_background: its row is there already, and follows. shows_messages: at the end it has the
        prompt and the answer as the model sees them."""
        self.response: dict[str, Any] = {**head, "status": "in_progress", "output": []}
        self.work = work
        self.generating = work.generating
        self.items = items
        self.stored = stored
        self.is_background = is_background
        self._num_top = num_top
        self._is_padded = is_padded
        self._number = 0
        self._open: _OpenItem | None = None
        self._finish_reason: str | None = None
        self._token_ids: list[int] | None = [] if shows_messages else None

    @property
    def dialect(self) -> StreamDialect:
        """The last event says all; nobody waits for a [DONE] here. Kept, it would hold this answer in a ring."""
        return StreamDialect(closing=b"", error_event=self._failed)

    # ------------------------------------------------------------------------------------------ in this order

    def encode(self, delta: OutputDelta) -> bytes:
        """What it adds. The first tells that the response has begun: one that fails before is answered with its
        status."""
        events = [] if self._number else [self._begun()]
        self._finish_reason = delta.finish_reason
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        logprobs = self._logprobs(delta)
        for piece in pieces_of(delta):
            events += self._opened_for(piece)
            if isinstance(piece, Content):
                # they are of all tokens of this difference
                events.append(self._difference(piece.text, logprobs))
                logprobs = ()
            elif not isinstance(piece, CallStart):
                events.append(self._difference(piece.text))
        if logprobs and self._open is not None and self._open.kind == "message":
            events.append(self._difference("", logprobs))
        return b"".join(events)

    async def end(self) -> bytes:
        """It is kept before its client can know that it is there."""
        events: list[bytes] = []
        for event in self._finished(usage_of(await self.work.usage())):
            events.append(event)
            # each has all of a message, whose log-probabilities may be many
            await asyncio.sleep(0)
        if self._token_ids is not None:
            self.response["input_messages"] = [await self._raw(self.work.prompts[0])]
            self.response["output_messages"] = [await self._raw(self._token_ids)]
        if self.is_background:
            await self.stored.update(self.response)
        else:
            await self.stored.add(self.response, self.items)
        events.append(self._ending())
        return b"".join(events)

    async def _raw(self, token_ids: list[int]) -> RawMessage:
        return RawMessage(await text_of(self.work.model, token_ids, skip_special_tokens=False), token_ids)

    def fold(self, delta: OutputDelta) -> None:
        self.encode(delta)

    async def whole(self) -> dict[str, Any]:
        await self.end()
        return self.response

    def _begun(self) -> bytes:
        self.response["status"] = "in_progress"
        return self._snapshot("response.created") + self._snapshot("response.in_progress")

    def _finished(self, usage: dict[str, Any]) -> Iterator[bytes]:
        """What stands before the event that ends the stream."""
        why_cut = _CUTS.get(self._finish_reason)
        if self._open is None and not self.response["output"]:
            # nothing but an end: still an answer, which is empty
            yield from self._opened_for(Content(""))
        status = "incomplete" if why_cut else "completed"
        yield from self._closed(status)
        self.response["status"] = status
        if why_cut:
            self.response["incomplete_details"] = {"reason": why_cut}
        else:
            self.response["completed_at"] = time.time()
        self.response["usage"] = usage

    def _logprobs(self, delta: OutputDelta) -> Sequence[TokenLogprob]:
        if self.work.params.logprobs is None or not delta.token_ids:
            return ()
        return chat_logprobs(TokenNames(self.work.model.renderer), delta.token_ids, delta.logprobs or [], self._num_top)

    def _ending(self) -> bytes:
        return self._snapshot(f"response.{self.response['status']}")

    def fail(self, error: ApiError) -> None:
        """Instead of an end, at any time."""
        self.response["status"] = "failed"
        code = (
            "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status < 500 else "server_error"
        )
        self.response["error"] = {"code": code, "message": error.message}
        if self._open is not None:
            self._open.item["status"] = "incomplete"
            self._keep(self._open)

    def _failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun."""
        self.fail(error)
        return self._ending()

    def cancel(self) -> None:
        """The same, because its client wants no more of it."""
        self.fail(ApiError(499, ""))
        self.response |= {"status": "cancelled", "error": None}

    # ------------------------------------------------------------------------------------------ items

    def _opened_for(self, piece: Piece) -> Iterator[bytes]:
        """The events that end one item and begin the next, if this piece is of another."""
        kind = _KINDS[type(piece)]
        if self._open is not None and self._open.kind == kind and not isinstance(piece, CallStart):
            return
        yield from self._closed("completed")
        item: Item = {"id": item_id(_ID_PREFIXES[kind]), "type": kind, "status": "in_progress"}
        if isinstance(piece, CallStart):
            item |= {"call_id": piece.id, "name": piece.name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        self._open = _OpenItem(kind, item, len(self.response["output"]))
        self.response["output"].append(item)
        yield self._event("response.output_item.added", self._open.place(), item=item)
        if kind != "function_call":
            self._open.delta_type = f"response.{_PART_NAMES[kind]}.delta"
            yield self._part("added", self._open, _part_of(kind, "", []))

    def _difference(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        one = self._open
        assert one is not None
        one.texts.append(text)
        number = self._number
        self._number = self._number + 1
        shown = b',"logprobs":%b' % one.logprobs.extend(logprobs) if one.kind == "message" else b""
        encoded = msgspec.json.encode(text)
        if self._is_padded:
            shown += obfuscation(len(str(number)) + len(encoded) + len(shown))
        return one.template() % (number, encoded, shown)

    def _closed(self, status: str) -> Iterator[bytes]:
        one = self._open
        self._open = None
        if one is None:
            return
        text = self._keep(one)
        one.item["status"] = status
        place = one.place()
        if one.kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done", one.text_place(), arguments=text, name=one.item["name"]
            )
        else:
            part = one.item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if one.kind == "message" else {}
            name = f"response.{_PART_NAMES[one.kind]}.done"
            yield self._event(name, one.text_place(), text=text, **logprobs)
            yield self._part("done", one, part)
        yield self._event("response.output_item.done", place, item=one.item)

    def _keep(self, one: _OpenItem) -> str:
        """Writes what came into the item."""
        text = "".join(one.texts)
        if one.kind == "function_call":
            one.item["arguments"] = text
        else:
            one.item["content"] = [_part_of(one.kind, text, one.logprobs.value())]
        return text

    # ------------------------------------------------------------------------------------------ events

    def _part(self, what: str, one: _OpenItem, part: Item) -> bytes:
        return self._event(f"response.content_part.{what}", one.text_place(), part=part)

    def _snapshot(self, kind: str) -> bytes:
        return self._event(kind, {}, response=self.response)

    def _event(self, kind: str, place: dict[str, Any], **values: Any) -> bytes:
        number = self._number
        self._number = self._number + 1
        return event_bytes({"type": kind, "sequence_number": number, **place, **values})


class _OpenItem:
    """The item that is being written."""

    def __init__(self, kind: str, item: Item, index: int) -> None:
        self.kind = kind
        self.item = item
        self.texts: list[str] = []
        # JSON, which each of the events that end the item repeats
        self.logprobs = JsonArray()
        self.delta_type = "response.function_call_arguments.delta"
        self._index = index
        self._template = b""

    def place(self) -> dict[str, Any]:
        return {"output_index": self._index}

    def text_place(self) -> dict[str, Any]:
        place = {"item_id": self.item["id"], **self.place()}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def template(self) -> bytes:
        """An event with holes: number, difference, the rest."""
        if not self._template:
            place = msgspec.json.encode(self.text_place())[1:-1].replace(b"%", b"%%")
            kind = self.delta_type.encode()
            head = b'event: %b\ndata: {"type":"%b",' % (kind, kind)
            self._template = head + b'"sequence_number":%d,' + place + b',"delta":%b%b}\n\n'
        return self._template


_CUTS: dict[str | None, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}
_KINDS: dict[type, str] = {
    Content: "message",
    Reasoning: "reasoning",
    CallStart: "function_call",
    CallArguments: "function_call",
}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PART_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


def _part_of(kind: str, text: str, logprobs: Any) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            **msgspec.to_builtins(usage.prompt_tokens_details),
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
