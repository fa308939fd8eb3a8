"""A server at an address, as a front reaches it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from quire.interfaces.deploy.front import READY_SECONDS, Head, NotReachedError, Request

# Of one connection only, or said anew by whoever passes a message on.
_NOT_PASSED_ON = frozenset(
    "connection content-length date host keep-alive proxy-connection server te trailer transfer-encoding"
    " upgrade".split()
)


class HttpCopy:
    def __init__(self, url: str, transport: Any = None) -> None:
        """`transport`: the way there, if not the network."""
        from httpx2 import AsyncClient, Limits, Timeout

        # a token may take as long as it takes: the server ends what stands still
        timeout = Timeout(None, connect=READY_SECONDS)
        # how many requests a server takes, it says itself
        limits = Limits(max_connections=None, max_keepalive_connections=None)
        self._client = AsyncClient(base_url=url, timeout=timeout, limits=limits, transport=transport, trust_env=False)

    async def is_ready(self) -> bool:
        from httpx2 import HTTPError

        try:
            return bool((await self._client.get("/health/ready", timeout=READY_SECONDS)).status_code == 200)
        except HTTPError:
            return False

    async def answer(self, request: Request) -> AsyncIterator[Head | bytes]:
        from httpx2 import ConnectError, ConnectTimeout, InvalidURL, LocalProtocolError

        try:
            answer = await self._client.send(self._asked(request), stream=True)
        except (ConnectError, ConnectTimeout) as error:
            raise NotReachedError from error
        except (InvalidURL, UnicodeError, LocalProtocolError) as error:
            # the request's mistake: raised, it would be taken for the loss of this server
            text = f"This request cannot be passed on: {error}"
            fields = {"message": text, "type": "invalid_request_error", "param": None, "code": None}
            yield Head(400, [("content-type", "application/json")])
            yield json.dumps({"error": fields}).encode()
            return
        try:
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _NOT_PASSED_ON]
            yield Head(answer.status_code, kept)
            async for part in answer.aiter_raw():
                yield part
        finally:
            await answer.aclose()

    def _asked(self, request: Request) -> Any:
        # headers are bytes, and Latin 1 is each of them as a character; blanks around a value are no part of it
        headers = [
            (name.encode("latin-1"), value.strip(" \t").encode("latin-1"))
            for name, value in request.headers
            if name.lower() not in _NOT_PASSED_ON
        ]
        return self._client.build_request(request.method, request.target, headers=headers, content=request.body)

    async def aclose(self) -> None:
        await self._client.aclose()
