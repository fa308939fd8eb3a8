"""Questions and answers between the first process and another one, over a pair of sockets that both have inherited.

Each side may ask the other at any time. A frame is its length and a MessagePack list:

    [number, name, arguments]        a question; number 0: nobody waits for an answer
    [number, null, result, error]    its answer

The other side's end is the end of the channel: what is open then raises ChannelClosedError. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.errors import QuireError

logger = logging.getLogger("quire.server")

Answers = Mapping[str, Callable[..., Any]]
_LENGTH_BYTES = 4


class ChannelClosedError(Exception):
    """The other process is gone."""


class ChannelError(Exception):
    """The other process could not do what it was asked."""


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        # answers that are being made
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @classmethod
    async def over(cls, connection: socket.socket, answers: Answers) -> Channel:
        """`answers`: functions by the names of questions, also asynchronous ones."""
        return cls(*await asyncio.open_connection(sock=connection), answers)

    async def run(self) -> None:
        """Until the other side is gone."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                self._take(msgspec.msgpack.decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()

    def tell(self, name: str, /, **arguments: Any) -> None:
        """A question that needs no answer."""
        if not self._is_closed:
            self._send([0, name, arguments])

    async def ask(self, name: str, /, **arguments: Any) -> Any:
        if self._is_closed:
            raise ChannelClosedError
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send([number, name, arguments])
            return await future
        finally:
            del self._open[number]

    def close(self) -> None:
        self._is_closed = True
        for future in self._open.values():
            if not future.done():
                future.set_exception(ChannelClosedError())
        for task in self._tasks:
            task.cancel()
        self._writer.close()

    def _take(self, frame: list[Any]) -> None:
        number, name, *rest = frame
        if name is not None:
            task = asyncio.ensure_future(self._answer(number, name, rest[0]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        future, (result, error) = self._open.get(number), rest
        if future is None or future.done():
            return  # whoever asked has left
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(ChannelError(error))

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        result = None
        error = None
        try:
            result = self._answers[name](**arguments)
            if inspect.isawaitable(result):
                result = await result
        except QuireError as failure:
            error = str(failure)
        except ChannelClosedError:
            error = "a third process was gone"
        except Exception as failure:
            logger.exception("%s between two processes of the server failed", name)
            error = f"{type(failure).__name__}: {failure}"
        if number and not self._is_closed:
            self._send([number, None, result, error])

    def _send(self, frame: list[Any]) -> None:
        data = msgspec.msgpack.encode(frame)
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
