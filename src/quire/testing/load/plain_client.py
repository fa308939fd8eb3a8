"""A client that costs little, for loads of many requests: one connection, one request at a time, bytes in and out."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Answer:
    """Status and body; the body of a stream is all of its events."""

    status: int
    body: bytes
    is_stream: bool

    def texts(self) -> list[str]:
        """The text of each choice of a completion, whole or streamed."""
        if not self.is_stream:
            return [choice["text"] for choice in json.loads(self.body)["choices"]]
        texts: dict[int, list[str]] = {}
        for line in self.body.split(b"\n\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts.setdefault(choice["index"], []).append(choice["text"])
        return ["".join(texts[index]) for index in sorted(texts)]

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
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        if self._writer is None:
            await self.connect()
        assert self._writer is not None
        self._writer.write(head.encode() + body)
        try:
            async with asyncio.timeout(leave_after if leave_after is not None else patience):
                return await self._answer()
        except TimeoutError:
            self.close()
            if leave_after is None:
                raise
            return None

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
