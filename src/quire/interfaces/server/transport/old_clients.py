"""Clients of HTTP/1.0 know no chunks: a body whose length is not known ends with its connection (RFC 9112, 6.1).

uvicorn sends chunks to everybody.
"""

from __future__ import annotations

from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application, for one request of such a client; uvicorn closes the connection after it by itself."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_open = False

        async def send_plainly(message: Any) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open:
                # as if just this piece had been announced
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
