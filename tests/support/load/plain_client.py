"""A client that costs little, for loads of many requests: one connection, one request at a time, bytes in and out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Choice:
    """One choice of a completion; of a stream, all of its events together."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        """The whole choice, or what an event has of it."""
        self.text += part["text"]
        self.finish_reason = part["finish_reason"] or self.finish_reason
        if part.get("logprobs"):
            self.tokens += part["logprobs"]["tokens"]
            self.logprobs += part["logprobs"]["token_logprobs"]


@dataclass(slots=True)
class Answer:
    """Status and body; the body of a stream is all of its events."""

    status: int
    body: bytes
    is_stream: bool

    def choices(self) -> list[Choice]:
        """Of a completion, whole or streamed, in the order of their numbers; an error has none."""
        if self.is_stream:
            events = [json.loads(line[6:]) for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]
        else:
            events = [json.loads(self.body)]
        found: dict[int, Choice] = {}
        for event in events:
            for part in event.get("choices", ()):
                found.setdefault(part["index"], Choice()).add(part)
        return [found[index] for index in sorted(found)]

    def texts(self) -> list[str]:
        """The text of each choice."""
        return [choice.text for choice in self.choices()]

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_whole(self) -> bool:
        """A stream that says its end."""
        return not self.is_stream or self.body.rstrip().endswith(b"data: [DONE]")


class PlainClient:
    """Connects when it must: after an abort, or when the server has closed."""

    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._place, limit=2**24)

    async def post(
        self, path: str, fields: dict[str, Any], *, leave_after: float | None = None, patience: float = 120
    ) -> Answer | None:
        """`leave_after`: seconds after which the connection is closed in the middle; then there is no answer."""
        return await self.send(path, json.dumps(fields).encode(), leave_after=leave_after, patience=patience)

    async def get(self, path: str) -> Answer:
        return await self._asked(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 120)

    async def send(
        self, path: str, body: bytes, *, leave_after: float | None = None, patience: float = 120
    ) -> Answer | None:
        """A body that is JSON already."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            return await self._asked(head.encode() + body, patience if leave_after is None else leave_after)
        except TimeoutError:
            if leave_after is None:
                raise
            return None

    async def _asked(self, message: bytes, seconds: float) -> Answer:
        if self._writer is None:
            await self.connect()
        assert self._writer is not None
        self._writer.write(message)
        try:
            async with asyncio.timeout(seconds):
                return await self._answer()
        except TimeoutError:
            self.close()
            raise

    async def _answer(self) -> Answer:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        status = int(head.split(b" ", 2)[1])
        is_stream = b"text/event-stream" in head
        if b"transfer-encoding: chunked" in head:
            body = await self._chunks()
        else:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            body = await self._reader.readexactly(length)
        if b"connection: close" in head:
            self.close()
        return Answer(status, body, is_stream)

    async def _chunks(self) -> bytes:
        assert self._reader is not None
        chunks = []
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            chunks.append((await self._reader.readexactly(size + 2))[:-2])
            if not size:
                return b"".join(chunks)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None
