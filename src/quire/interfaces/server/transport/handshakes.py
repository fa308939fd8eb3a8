"""Connections that are to be encrypted, until they are.

A loop that is told to speak TLS says nothing of a connection before its handshake is done: whoever sends none would be
counted nowhere, and keep a descriptor for a minute. So connections are accepted in the clear, are unfinished from then
on as any other that has not said what it wants, and become encrypted here.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from uvicorn.protocols.utils import get_remote_addr

from quire.interfaces.server.transport.unfinished import Unfinished, num_unread

logger = logging.getLogger("quire.server.access")


class _Begun:
    """A coroutine that makes its first step at once. What comes of a connection goes to TLS from then on: uvloop begins
    to read as soon as a protocol has its transport, before any task can run."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._rest = coroutine.__await__()
        self._waits_for = next(self._rest)

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._waits_for
        return (yield from self._rest)


class Handshake(asyncio.Protocol):
    """Of one connection. `make` gives the protocol that has it from then on."""

    transport: asyncio.Transport

    def __init__(
        self, make: Callable[[], Any], context: ssl.SSLContext, head_seconds: float, unfinished: Unfinished
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.head_seconds = head_seconds
        self.client: tuple[str, int] | None = None
        self._make = make
        self._context = context
        self._unfinished = unfinished
        # what came with the end of the handshake
        self._data = bytearray()
        self._has_ended = False
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.client = get_remote_addr(transport)
        self._unfinished.arrive(self)
        shaking = self.loop.start_tls(
            transport, self, self._context, server_side=True, ssl_handshake_timeout=self.head_seconds
        )
        self._shaking = self.loop.create_task(self._shake_hands(_Begun(shaking)))

    async def _shake_hands(self, shaking: _Begun) -> None:
        encrypted = None
        try:
            encrypted = await shaking
        except (OSError, TimeoutError) as error:
            # ssl.SSLError is an OSError: it spoke something else, or does not know this certificate
            address = "{}:{}".format(*self.client) if self.client else "somebody"
            logger.debug("no TLS with %s: %s", address, error)
            self.transport.abort()
        finally:
            self._unfinished.leave(self)
        if encrypted is None or self.transport.is_closing():
            # it was closed from here, which is no error to who waits for the handshake
            return
        protocol = self._make()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._data:
            protocol.data_received(bytes(self._data))
        if self._has_ended:
            protocol.eof_received()
            encrypted.close()

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._has_ended = True

    def give_up(self) -> bool:
        self.transport.abort()
        return True

    def has_unread(self) -> bool:
        return num_unread(self.transport) > 0
