"""One copy: a whole `quire serve` in a process of its own, on loopback, kept by a replica of Ray Serve."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from quire.errors import EngineError
from quire.interfaces.deploy.front import Head, Request
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document

_PROGRAM = "quire.interfaces.deploy.server_process"
_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_HEALTH_SECONDS = 10.0
# Of one connection only, or said anew by whoever passes a message on.
_NOT_PASSED_ON = frozenset("connection content-length date host keep-alive server transfer-encoding upgrade".split())


class ServerDocument(msgspec.Struct, kw_only=True):
    """What the process of a server is told."""

    engine_options: dict[str, Any]
    server_options: dict[str, Any]
    port: int


class ServedCopy:
    def __init__(self, engine_options: dict[str, Any], server_options: dict[str, Any]) -> None:
        from httpx2 import AsyncClient, Timeout

        port = _free_port()
        document = ServerDocument(engine_options=engine_options, server_options=server_options, port=port)
        self._process = ChildProcess(encode_document(document), [], program=_PROGRAM)
        self._is_closed = False
        # a token may take as long as it takes: the server ends what stands still
        self._client = AsyncClient(
            base_url=f"http://{_HOST}:{port}", timeout=Timeout(None, connect=_HEALTH_SECONDS), trust_env=False
        )

    async def wait_ready(self) -> None:
        """Until the model is there."""
        while not await self.is_ready():
            if self._process.has_ended:
                raise EngineError(f"the server has ended ({self._process.how_it_ended()}). Its log says why.")
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def is_ready(self) -> bool:
        from httpx2 import HTTPError

        try:
            return bool((await self._client.get("/health/ready")).status_code == 200)
        except HTTPError:
            return False

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        headers = [(name, value) for name, value in request.headers if name.lower() not in _NOT_PASSED_ON]
        asked = self._client.build_request(request.method, request.target, headers=headers, content=request.body)
        answer = await self._client.send(asked, stream=True)
        try:
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _NOT_PASSED_ON]
            yield Head(answer.status_code, kept)
            async for part in answer.aiter_raw():
                yield part
        finally:
            await answer.aclose()

    def close(self) -> None:
        """May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._process.close()


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind((_HOST, 0))
        return int(asked.getsockname()[1])
