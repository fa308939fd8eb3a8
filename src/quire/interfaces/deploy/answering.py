"""What a front says, as a response of Starlette. Loaded where HTTP is served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from quire.interfaces.deploy.front import Head, Request
from quire.interfaces.server.options import ServerOptions
from quire.interfaces.server.wire.errors import CLOSE, ApiError, idle, rate_limited

# what a log calls a client that has left; nobody reads it
_GONE = 499
_RETRY_SECONDS = 1


class AnyFront(Protocol):
    async def answer(self, request: Request) -> tuple[Head, AsyncGenerator[bytes, None]]: ...


class BodyRoom:
    """Room for the bodies of all requests that a front has. One client with several of them has no more than half."""

    def __init__(
        self,
        most: int,
        most_of_one: int = ServerOptions.max_body_bytes,
        part_seconds: float = ServerOptions.first_byte_seconds,
        whole_seconds: float = ServerOptions.max_request_seconds,
    ) -> None:
        """In bytes. `part_seconds`: for the next part of a body; `whole_seconds`: for all of it."""
        self.most = most
        self.most_of_one = most_of_one
        self.part_seconds = part_seconds
        self.whole_seconds = whole_seconds
        self.num_taken = 0
        self.taken_by: Counter[str] = Counter()


class HeldBody:
    """The body of one request. It is kept until that is answered: another server may have to be asked."""

    def __init__(self, room: BodyRoom, client: str) -> None:
        self._room = room
        self._client = client
        self.data = bytearray()

    async def read(self, request: HttpRequest) -> None:
        """Raises ApiError where there is no room for it, or it does not come."""
        parts = request.stream()
        seconds = self._room.whole_seconds
        try:
            async with asyncio.timeout(seconds):
                while (part := await self._next_of(parts)) is not None:
                    self._take(part)
        except TimeoutError:
            raise idle(f"The body did not come whole within {seconds:g} seconds.") from None

    async def _next_of(self, parts: AsyncIterator[bytes]) -> bytes | None:
        seconds = self._room.part_seconds
        try:
            async with asyncio.timeout(seconds):
                return await anext(parts, None)
        except TimeoutError:
            raise idle(f"Nothing of the body came for {seconds:g} seconds.") from None

    def _take(self, part: bytes) -> None:
        room = self._room
        if len(self.data) + len(part) > room.most_of_one:
            raise ApiError(413, f"The body has more than {room.most_of_one} bytes.", headers=CLOSE)
        if room.num_taken + len(part) > room.most:
            text = f"The requests that are in flight here have bodies of {room.num_taken} bytes, of {room.most}."
            raise rate_limited(text, _RETRY_SECONDS)
        num_of_others = room.taken_by[self._client] - len(self.data)
        if num_of_others and num_of_others + len(self.data) + len(part) > room.most // 2:
            # whoever sends bodies slowly keeps their room for minutes
            text = f"This client's requests that are in flight have bodies of {num_of_others} bytes: half of the room."
            raise rate_limited(text, _RETRY_SECONDS)
        room.num_taken += len(part)
        room.taken_by[self._client] += len(part)
        self.data += part

    def free(self) -> None:
        """May be called twice."""
        room = self._room
        room.num_taken -= len(self.data)
        room.taken_by[self._client] -= len(self.data)
        if not room.taken_by[self._client]:
            del room.taken_by[self._client]
        self.data = bytearray()


class _Passed(StreamingResponse):
    """An answer that is passed on; the request's body goes with its end, whatever that is."""

    def __init__(self, parts: AsyncGenerator[bytes, None], head: Head, body: HeldBody) -> None:
        super().__init__(parts, head.status, dict(head.headers))
        self._parts = parts
        self._held = body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.free()
            # a client that left before the first part has read nothing of it
            await self._parts.aclose()


async def answer(front: AnyFront, request: HttpRequest, room: BodyRoom, client: str = "") -> Response:
    """`client`: who asks, if a key says so; else it is an address."""
    # not request.url: the header Host is a part of that, and says what it likes
    path = request.scope["path"]
    query = request.scope["query_string"].decode("latin-1")
    target = quote(path) + (f"?{query}" if query else "")
    body = HeldBody(room, client or (request.client.host if request.client is not None else ""))
    response: Response | None = None
    try:
        await body.read(request)
        asked = Request(request.method, target, request.headers.items(), bytes(body.data))
        response = await _answered(front, request, asked, body)
    except ApiError as error:
        response = error.response(path)
    finally:
        if not isinstance(response, _Passed):
            body.free()
    return response


async def _answered(front: AnyFront, request: HttpRequest, asked: Request, body: HeldBody) -> Response:
    answering = asyncio.ensure_future(front.answer(asked))
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=_GONE)
        head, parts = await answering
        return _Passed(parts, head, body)
    finally:
        # nothing but the end of a connection follows a body
        answering.cancel()
        gone.cancel()
