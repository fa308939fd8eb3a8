"""A proxy that falls silent: it keeps the connections of both sides open, takes nothing more and passes nothing on.

What is left of a network that has lost a client: the server's system hears of nobody's end. Unlike a network that is
cut, this machine still says that it got what fits into its buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.support.faults import disconnects

_PIECE = 1024


class SilentProxy:
    """`async with SilentProxy(url) as proxy`: clients connect to `proxy.url`."""

    def __init__(self, url: str) -> None:
        self._whither = url
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    def fall_silent(self) -> None:
        """For good."""
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers:
            with contextlib.suppress(RuntimeError):  # what is full has paused by itself
                writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_PIECE)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"{urlsplit(self._whither).scheme}://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await asyncio.to_thread(disconnects.connect, self._whither, is_narrow=True)
        connection.setblocking(False)
        server_reader, server_writer = await asyncio.open_connection(sock=connection, limit=_PIECE)
        self._writers += [writer, server_writer]
        self._pumps += [
            asyncio.create_task(_pump(reader, server_writer)),
            asyncio.create_task(_pump(server_reader, writer)),
        ]


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
