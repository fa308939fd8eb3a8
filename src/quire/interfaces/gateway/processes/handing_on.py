"""Connections from one process to another: the socket itself goes, with what was read of it, and the sender lets go.

What a server keeps (sessions, batches, responses and so on) lives in its first process. A further one that is asked for
it hands the whole connection on before it has answered anything; the client notices nothing, and its later requests on
the same connection go to the first process as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable

from quire.interfaces.server.access.caller import PUBLIC_PATHS, STATELESS_PATHS
from quire.interfaces.server.page import PATHS as PAGE_PATHS
from quire.interfaces.server.process_role import HandOn
from quire.processes.nameless_file import nameless_file

_MARK = b"c"
# What each process answers; everything else is the first one's.
_GET = frozenset(path.encode() for path in PUBLIC_PATHS | PAGE_PATHS) | {
    b"/metrics",
    b"/openapi.json",
    b"/v1/models",
    b"/v1/completions/stream",
}
_POST = frozenset(path.encode() for path in STATELESS_PATHS | {"/ping"})


def is_for_any(method: bytes, target: bytes, prefix: bytes = b"") -> bool:
    """Whether every process can answer this; errors of the request itself included. `prefix`: of paths that a proxy
    hands on."""
    path = target.partition(b"?")[0]
    if prefix and path.startswith(prefix + b"/"):
        path = path[len(prefix) :]
    match method:
        case b"GET" | b"HEAD":
            return path in _GET or path.startswith(b"/v1/models/")
        case b"POST":
            return path in _POST
        case b"OPTIONS":
            return True
        case _:
            return False


def hander_on(to_first: socket.socket) -> HandOn:
    """For a further process."""
    to_first.setblocking(False)

    def hand_on(connection: int, data: bytes) -> bool:
        file = nameless_file("quire-request", data)
        try:
            socket.send_fds(to_first, [_MARK], [connection, file])
        except OSError:
            return False
        finally:
            os.close(file)
        return True

    return hand_on


class HandedOn:
    """For the first process: what comes from one other, until `close`."""

    def __init__(self, from_other: socket.socket, adopt: Callable[[socket.socket, bytes], Awaitable[None]]) -> None:
        self._socket = from_other
        self._socket.setblocking(False)
        self._adopt = adopt
        self._tasks: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._take)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _take(self) -> None:
        while True:
            try:
                mark, descriptors, _, _ = socket.recv_fds(self._socket, len(_MARK), 2)
            except BlockingIOError:
                return None
            except OSError:
                return self.close()
            if not mark:
                return self.close()
            if len(descriptors) == 2:
                self._begin(*descriptors)
            else:
                # this process has no descriptor to spare
                for descriptor in descriptors:
                    os.close(descriptor)

    def _begin(self, descriptor: int, file: int) -> None:
        with os.fdopen(file, "rb") as content:
            content.seek(0)
            data = content.read()
        task = asyncio.ensure_future(self._adopted(socket.socket(fileno=descriptor), data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopted(self, connection: socket.socket, data: bytes) -> None:
        connection.setblocking(False)
        # the client may be gone
        with contextlib.suppress(OSError):
            await self._adopt(connection, data)
