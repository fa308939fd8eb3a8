"""A link to a core that another process has started: for processes that share an engine.

The socket is that of a SocketLink, in a folder that who owns the engine has made; the core is told of it
(engine_core/further_clients.py). Of the core's death its owner hears first; this side is told by it, and closes its
client.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine_client.socket_link import ClientSocket
from quire.messages import ToClient, ToCore

if TYPE_CHECKING:
    from quire.engine_client.replica_link import Loss


class AttachedLink:
    # not this side's to watch or to end
    processes = ()

    def __init__(self, folder: str) -> None:
        """Waits in this folder from now on."""
        self._end = ClientSocket(folder)
        self._socket = self._end.socket
        # also of a link that is forgotten: a context that is collected before its socket would wait for it for ever
        self._close = weakref.finalize(self, self._end.close)
        try:
            self._socket.bind(self._end.endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, *messages: ToCore) -> None:
        if not self._socket.closed:
            self._end.send(*messages)

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        if self._socket.closed:
            return []
        messages = self._end.received()
        if not messages and timeout != 0:
            self._socket.poll(None if timeout is None else int(timeout * 1000))
            messages = self._end.received()
        return messages

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None: ...

    def watch_losses(self, tell: Callable[[Loss], None]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        return () if self._socket.closed else (int(self._socket.FD),)

    def statistics(self) -> dict[str, float]:
        return self._end.incoming.statistics()

    def close(self) -> None:
        self._close()
