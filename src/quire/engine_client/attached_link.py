"""A link to a core that another process has started: for processes that share an engine.

The socket is a file in a folder that only this user may enter, as that of a SocketLink, and goes as soon as both sides
have met. Who owns the engine makes the folder, and has the core told of it (engine_core/further_clients.py). Of the
core's death its owner hears first; this side is told by it, and closes its client.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from quire.engine_client.socket_link import Incoming
from quire.message_encoding import encode
from quire.messages import ToClient, ToCore

if TYPE_CHECKING:
    from quire.engine_client.replica_link import Loss


def endpoint_in(folder: str) -> str:
    """Where the link waits for the core."""
    return f"ipc://{folder}/core"


class AttachedLink:
    # not this side's to watch or to end
    processes = ()

    def __init__(self, folder: str) -> None:
        """Waits in this folder from now on."""
        self._folder: str | None = folder
        context = zmq.Context()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._incoming = Incoming(self._socket)
        # also of a link that is forgotten: a context that is collected before its socket would wait for it for ever
        self._close = weakref.finalize(self, _give_back, self._socket, context, folder, os.getpid())
        self._socket.set_hwm(0)
        self._socket.linger = 0
        try:
            self._socket.bind(endpoint_in(folder))
        except BaseException:
            self.close()
            raise

    def send(self, *messages: ToCore) -> None:
        # EAGAIN: there is no core any more
        if not self._socket.closed:
            with contextlib.suppress(zmq.Again):
                for message in messages:
                    self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        if self._socket.closed:
            return []
        messages = self._received()
        if not messages and timeout != 0:
            self._socket.poll(None if timeout is None else int(timeout * 1000))
            messages = self._received()
        return messages

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None: ...

    def watch_losses(self, tell: Callable[[Loss], None]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        return () if self._socket.closed else (int(self._socket.FD),)

    def statistics(self) -> dict[str, float]:
        return self._incoming.statistics()

    def close(self) -> None:
        self._close()

    def _received(self) -> list[ToClient]:
        messages = self._incoming.take()
        if messages:
            # both sides have met
            self._remove_folder()
        return messages

    def _remove_folder(self) -> None:
        folder = self._folder
        self._folder = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _give_back(socket: zmq.Socket[bytes], context: zmq.Context[Any], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner has copies of all this, but none of it is its own
    socket.close()
    context.term()
    shutil.rmtree(folder, ignore_errors=True)
