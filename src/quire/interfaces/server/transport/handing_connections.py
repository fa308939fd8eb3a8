"""Connections of a process that does not answer everything itself: what it has no part in, it hands on.

The first line of a request decides, before anything of it is parsed. A request that came in one packet with another one
(pipelining) cannot be handed on: the bytes of both are mixed by then. It is told to come by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.interfaces.server.access.caller import new_request_id
from quire.interfaces.server.transport.connections import Connection
from quire.interfaces.server.wire.errors import CLOSE, ApiError, unavailable

# A longer first line is refused by whoever parses it.
_LONGEST_LINE = 64 * 1024
# until what was answered before has left
_PAUSE_SECONDS = 0.01


class HandingConnection(Connection):
    # given by `handing_connections_of`
    hand_on: Callable[[int, bytes], bool]
    is_for_any: Callable[[bytes, bytes], bool]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # the beginning of a request whose first line is not whole yet
        self._begun = b""
        self._is_gone = False

    def data_received(self, data: bytes) -> None:
        if self._is_gone:
            return
        if not self._is_between_requests:
            super().data_received(data)
            return
        data = self._begun + data
        self._begun = b""
        end = data.find(b"\n")
        if end < 0 and len(data) < _LONGEST_LINE:
            self._begun = data
            return
        words = data[: max(0, end)].split()
        if len(words) != 3 or type(self).is_for_any(words[0], words[1]):
            super().data_received(data)
        elif self.transport.get_write_buffer_size():
            self._begun = data
            # nothing more until then: it would be kept as well
            self.flow.pause_reading()
            self.loop.call_later(_PAUSE_SECONDS, self._try_again)
        else:
            self._let_go(data)

    def on_headers_complete(self) -> None:
        app = self.app
        if not type(self).is_for_any(self.parser.get_method(), self.url):
            self.app = _misdirected
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    @property
    def _is_between_requests(self) -> bool:
        if self._head is not None or self._is_refused:
            return False
        return self.cycle is None or (self.cycle.response_complete and not self.cycle.more_body)

    def _try_again(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(b"")

    def _let_go(self, data: bytes) -> None:
        transport = self.transport
        transport.pause_reading()
        if type(self).hand_on(transport.get_extra_info("socket").fileno(), data):
            self._is_gone = True
            # closes this process's descriptor of the connection, not the connection
            transport.abort()
        else:
            transport.resume_reading()
            self._refuse(unavailable("The process that keeps what this request is about has too much to do."))


def handing_connections_of(
    hand_on: Callable[[int, bytes], bool], is_for_any: Callable[[bytes, bytes], bool]
) -> type[HandingConnection]:
    members = {"hand_on": staticmethod(hand_on), "is_for_any": staticmethod(is_for_any)}
    return type("HandingConnection", (HandingConnection,), members)


async def _misdirected(scope: Any, receive: Any, send: Any) -> None:
    text = "This request came behind another one on its connection, to a process that cannot answer it. Send it again."
    headers = {**CLOSE, "x-request-id": new_request_id()}
    error = ApiError(421, text, code="misdirected_request", headers=headers)
    await error.response(scope["path"])(scope, receive, send)
