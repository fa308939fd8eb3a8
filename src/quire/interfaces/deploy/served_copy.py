"""One copy: a whole `quire serve` in a process of its own, on loopback, kept by a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec

from quire.errors import EngineError
from quire.interfaces.deploy.http_copy import HttpCopy
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document

_PROGRAM = "quire.interfaces.deploy.server_process"
_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1


class ServerDocument(msgspec.Struct, kw_only=True):
    """What the process of a server is told."""

    engine_options: dict[str, Any]
    server_options: dict[str, Any]
    port: int


class ServedCopy:
    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any]) -> None:
        port = _free_port()
        document = ServerDocument(engine_options=engine_options, server_options=server_options, port=port)
        self._process = ChildProcess(encode_document(document), [], program=_PROGRAM)
        self._is_closed = False
        server = HttpCopy(f"http://{_HOST}:{port}")
        self.is_ready = server.is_ready
        self.answer = server.answer

    async def wait_ready(self) -> None:
        """Until the model is there."""
        while not await self.is_ready():
            if self._process.has_ended:
                raise EngineError(f"the server has ended ({self._process.how_it_ended()}). Its log says why.")
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def close(self) -> None:
        """May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._process.close()


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind((_HOST, 0))
        return int(asked.getsockname()[1])
