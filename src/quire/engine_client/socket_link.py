"""The core in a process of its own, behind a ZeroMQ socket.

The socket is a file in a fresh folder that only this user may enter. It is needed until both sides have met: then, long
before the model is loaded, the core's process removes the folder, so that no later stranger can connect and no kind of
death leaves a file.
Messages are msgspec structs, decoded strictly; a frame that cannot be decoded is counted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from quire.engine_client.engine_process import EngineProcess
from quire.errors import EngineDeadError, EngineError
from quire.message_encoding import decode_to_client, encode
from quire.messages import EngineFailed, ToClient, ToCore
from quire.processes.child_process import ChildProcess
from quire.processes.documents import encode_document

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine_client.replica_link import Loss
    from quire.engine_core.pulse import PulsePage

# After its death a core's last words may still be on their way through the socket.
_LAST_WORDS_MILLISECONDS = 200
# The kernel takes no longer names for a Unix socket (108 bytes on Linux, 104 elsewhere, with a closing zero).
_LONGEST_PATH = 100


class ClientSocket:
    """The client's end of the socket, and everything that must be given back with it, however the link is lost: closed,
    forgotten, or at the interpreter's end."""

    def __init__(self, folder: str, page: PulsePage | None = None) -> None:
        """In a folder that goes as soon as both sides have met. `page`: of a core that was started here."""
        self.owner = os.getpid()
        self.folder: str | None = folder
        self.endpoint = endpoint_in(folder)
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.PAIR)
        self.incoming = Incoming(self.socket)
        self.child: ChildProcess | None = None
        # of whoever uses the socket or waits for the child: no two threads may
        self.turn = threading.RLock()
        self._page = page
        # Requests are bounded where they come in; a limit here would block the event loop or lose a message.
        self.socket.set_hwm(0)
        self.socket.linger = 0

    def send(self, *messages: ToCore) -> int:
        """How many were sent: none, where there is no core any more."""
        num_sent = 0
        with contextlib.suppress(zmq.Again):
            for message in messages:
                self.socket.send(encode(message), zmq.NOBLOCK)
                num_sent += 1
        return num_sent

    def received(self) -> list[ToClient]:
        messages = self.incoming.take()
        if messages:
            # both sides have met
            self._remove_folder()
        return messages

    def close(self) -> None:
        if os.getpid() != self.owner:
            return  # a fork of the owner has copies of all this, but none of it is its own
        if self.child is not None:
            # wakes a thread that waits for output
            self.child.end()
        with self.turn:
            child = self.child
            self.child = None
            if child is not None:
                child.close()
            self.socket.close()
            self.context.term()
            if self._page is not None:
                self._page.close()
            self._remove_folder()

    def _remove_folder(self) -> None:
        folder = self.folder
        self.folder = None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class SocketLink:
    def __init__(self, config: EngineConfig, *, core: str | None = None) -> None:
        from quire.engine_core.launch_document import LaunchDocument
        from quire.engine_core.pulse import PulsePage

        page = PulsePage()
        folder = fresh_folder()
        self._end = ClientSocket(folder, page)
        self._close = weakref.finalize(self, self._end.close)
        self._socket = self._end.socket
        self._is_over = False
        try:
            self._socket.bind(self._end.endpoint)
            document = LaunchDocument(
                config=config,
                endpoint=self._end.endpoint,
                folder=folder,
                pulse_descriptor=page.descriptor,
                log_level=logging.getLogger("quire").getEffectiveLevel(),
            )
            child = ChildProcess(encode_document(document), ["--core", core] if core else [], (page.descriptor,))
            self._end.child = child
            self.process = EngineProcess(child.pid, page)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[EngineProcess, ...]:
        return (self.process,)

    @property
    def _child(self) -> ChildProcess | None:
        return self._end.child

    @property
    def pid(self) -> int:
        """The process of the core."""
        if self._child is None:
            raise EngineError("The engine was shut down.")
        return self._child.pid

    def send(self, *messages: ToCore) -> None:
        with self._end.turn:
            if not self._is_over:
                # of none `receive` is about to say so
                self.process.num_sent += self._end.send(*messages)

    def receive(self, timeout: float | None = None) -> list[ToClient]:
        """Nothing after `close`, which another thread may call meanwhile."""
        with self._end.turn:
            return self._receive(timeout)

    def _receive(self, timeout: float | None) -> list[ToClient]:
        if self._is_over:
            return []
        messages = self._end.received()
        while not messages:
            if self._child is None or self._child.has_ended:
                return self._last_words()
            if timeout == 0:
                break
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._child.end_descriptor, zmq.POLLIN)
            poller.poll(None if timeout is None else int(timeout * 1000))
            timeout = 0 if timeout is not None else None
            if self._is_over:
                return []
            messages = self._end.received()
        return messages

    def keep_back_while(self, is_patient: Callable[[], bool]) -> None: ...

    def watch_losses(self, tell: Callable[[Loss], None]) -> None: ...

    def descriptors(self) -> tuple[int, ...]:
        if self._child is None or self._socket.closed:
            return ()
        return (int(self._socket.FD), self._child.end_descriptor)

    def statistics(self) -> dict[str, float]:
        return self._end.incoming.statistics()

    def close(self) -> None:
        self._is_over = True
        self._close()

    def _last_words(self) -> list[ToClient]:
        """What a process that has ended still said, closed by the failure that its end is."""
        messages: list[ToClient] = []
        while self._socket.poll(_LAST_WORDS_MILLISECONDS):
            messages += self._end.received()
        self._is_over = True
        if not any(isinstance(message, EngineFailed) for message in messages):
            assert self._child is not None
            text = f"The engine's process ended ({self._child.how_it_ended()}). Requests in flight are lost."
            messages.append(EngineFailed(kind=EngineDeadError.__name__, error=text))
        return messages


def endpoint_in(folder: str) -> str:
    """Where the link waits for the core."""
    return f"ipc://{folder}/core"


def fresh_folder() -> str:
    """A folder that only this user may enter; near the root if the temporary folder's own name is too long."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/quire-12345678/core")
    return tempfile.mkdtemp(prefix="quire-", dir=None if longest <= _LONGEST_PATH else "/tmp")


logger = logging.getLogger(__name__)


class Incoming:
    """What a core says, decoded strictly: a frame that is no message is counted and dropped, and the first one
    logged."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._num_garbage_frames = 0

    def take(self) -> list[ToClient]:
        """All that is there; does not wait."""
        messages: list[ToClient] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(decode_to_client(frame))
            except Exception as error:
                # Any: bytes from elsewhere may also exhaust the decoder's recursion or its memory.
                self._count(frame, error)

    def statistics(self) -> dict[str, float]:
        return {"garbage_frames_dropped": self._num_garbage_frames}

    def _count(self, frame: bytes, error: Exception) -> None:
        self._num_garbage_frames += 1
        if self._num_garbage_frames == 1:
            text = "dropped a frame of %d bytes that is no message (%s); others will be counted only"
            logger.warning(text, len(frame), error)
