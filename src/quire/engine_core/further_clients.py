"""Clients of a core beside the one that started it: other processes, each with a socket of its own.

The first client speaks for them: it says where one waits, and when one is gone (`clients.open`, `clients.close`).
Each has a number, which stands in the high bits of its requests' ids:

    request id   [ client: 9 bits | its own count: 44 bits ]

so ids never collide, and a step's output says itself whom each part of it is for. The first client's number is 0. A
number is never given again while anything of its last bearer may be on its way. Owns the sockets, and what is open.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from quire.engine_core.driver import CoreDriver
from quire.engine_core.unread_frames import answer_to_no_message
from quire.errors import UserError
from quire.message_encoding import decode_to_core, encode
from quire.messages import (
    MOST_CLIENTS,
    AbortRequests,
    CacheChanged,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineRequest,
    Message,
    ToClient,
    ToCore,
    client_of,
    first_request_id_of,
    split_sequence_id,
)
from quire.observability.step_times import NoStepTimes
from quire.processes.arrivals import Arrivals

logger = logging.getLogger(__name__)


class _Client:
    def __init__(self, number: int, socket: zmq.Socket[bytes], times: NoStepTimes) -> None:
        self.number = number
        self.socket = socket
        self._times = times
        # outputs that have not ended, by request: what is to be aborted if the client dies
        self.open: dict[int, int] = {}

    def send(self, message: Message) -> None:
        # EAGAIN: it is gone, and the first client is about to say so
        with contextlib.suppress(zmq.Again):
            frame = encode(message)
            self.socket.send(frame, zmq.NOBLOCK)
            self._times.sent("clients", len(frame))


class FurtherClients:
    """None at first. Used by the loop of the core's process, between two steps."""

    def __init__(self, context: zmq.Context[Any], poller: zmq.Poller, arrivals: Arrivals) -> None:
        """`poller`: what the loop sleeps at, and `arrivals`: what a long step looks at."""
        self._context = context
        self._arrivals = arrivals
        self._poller = poller
        self._driver: CoreDriver | None = None
        self.clients: dict[int, _Client] = {}

    def serve(self, driver: CoreDriver) -> None:
        """From here on clients may come."""
        self._driver = driver
        driver.operations |= {
            "clients.open": self.open,
            "clients.close": self.close_one,
            "clients.list": lambda: {client.number: len(client.open) for client in self.clients.values()},
        }

    # ------------------------------------------------------------------------------------------ coming and going

    def open(self, number: int, endpoint: str) -> bool:
        """A client that waits at this address. What it hears first is that the engine is ready, and what it holds."""
        assert self._driver is not None
        if not 0 < number < MOST_CLIENTS or number in self.clients:
            raise UserError(f"number={number}: must be a free one between 1 and {MOST_CLIENTS - 1}.")
        socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 0
        # Once its client is gone, whoever could make a socket of that name must not be connected to.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self._arrivals.watch(socket.fileno())
        client = self.clients[number] = _Client(number, socket, self._driver.times)
        # how it was built is told once
        core = self._driver.core
        ready = msgspec.structs.replace(core.ready, first_request_id=first_request_id_of(number), report=[])
        client.send(ready)
        # it routes by what replicas hold, and has missed how that came
        if (held := core.held_in_cache()) is not None:
            client.send(held)
        return True

    def close_one(self, number: int) -> int:
        """A client that is gone: its requests are aborted. Says how many there were."""
        assert self._driver is not None
        client = self.clients.pop(number, None)
        if client is None:
            return 0
        self._poller.unregister(client.socket)
        self._arrivals.forget(client.socket.fileno())
        client.socket.close()
        if client.open:
            self._driver.handle(AbortRequests(request_ids=list(client.open)))
        return len(client.open)

    def close(self) -> None:
        for client in self.clients.values():
            client.socket.close()
        self.clients.clear()

    # ------------------------------------------------------------------------------------------ messages in

    def hand_to(self, driver: CoreDriver, on_done: Callable[[], None]) -> bool:
        """Everything that has arrived. Whether there was anything."""
        has_come = False
        for client in list(self.clients.values()):
            while True:
                try:
                    frame = client.socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                has_come = True
                self._take(client, frame, driver)
                on_done()
        return has_come

    def _take(self, client: _Client, frame: bytes, driver: CoreDriver) -> None:
        try:
            message = decode_to_core(frame)
            _check_whose(message, client.number)
        except Exception as error:
            # Any: what cannot be decoded may also exhaust the decoder's recursion or its memory.
            self._refuse(client, frame, error, driver)
            return
        if isinstance(message, EngineRequest):
            client.open[message.request_id] = message.sampling.n
        elif isinstance(message, ControlCall):
            message.call_id += first_request_id_of(client.number)
        driver.handle(message)

    def _refuse(self, client: _Client, frame: bytes, error: Exception, driver: CoreDriver) -> None:
        logger.warning("client %d sent %d bytes that are no message of its own: %s", client.number, len(frame), error)
        answer = answer_to_no_message(frame, error)
        if answer is None:
            return
        client.send(answer)
        if isinstance(answer, EngineOutputs):
            # It may be running, if the frame was to extend it. Its reader has heard the last of it.
            request_id = split_sequence_id(answer.ends[0].sequence_id)[0]
            if client.open.pop(request_id, None) is not None:
                driver.handle(AbortRequests(request_ids=[request_id]))

    # ------------------------------------------------------------------------------------------ messages out

    def send(self, message: ToClient, to_first: Callable[[Message], None]) -> None:
        """To whom it is for; what is for nobody who is still there is dropped."""
        match message:
            case EngineOutputs():
                for number, part in parts_of(message).items():
                    if number == 0:
                        to_first(part)
                    elif (client := self.clients.get(number)) is not None:
                        _close_ended(client.open, part)
                        client.send(part)
            case ControlReply():
                self._reply(message, to_first)
            case CacheChanged():
                # each of them routes by what replicas hold
                to_first(message)
                for client in self.clients.values():
                    client.send(message)
            case EngineFailed():
                to_first(message)
                for client in self.clients.values():
                    # it is to be heard before the socket closes
                    client.socket.linger = 1000
                    client.send(message)
            case _:
                to_first(message)

    def _reply(self, reply: ControlReply, to_first: Callable[[Message], None]) -> None:
        number = client_of(reply.call_id)
        if number == 0:
            to_first(reply)
        elif (client := self.clients.get(number)) is not None:
            reply.call_id -= first_request_id_of(number)
            client.send(reply)


def _check_whose(message: ToCore, number: int) -> None:
    """What a client says may be about its own requests alone."""
    match message:
        case AbortRequests():
            ids: Iterable[int] = [*message.request_ids, *(split_sequence_id(one)[0] for one in message.sequence_ids)]
        case ControlCall():
            ids = () if 0 <= message.call_id < first_request_id_of(1) else (-1,)
            if message.name.startswith("clients."):
                raise ValueError("clients come and go by the word of the first one")
        case _:
            ids = (message.request_id,)
    for request_id in ids:
        if request_id < 0 or client_of(request_id) != number:
            raise ValueError(f"the number {request_id} is not of this client")


def _close_ended(open_outputs: dict[int, int], outputs: EngineOutputs) -> None:
    for end in outputs.ends:
        request_id = split_sequence_id(end.sequence_id)[0]
        left = open_outputs.get(request_id, 0) - 1
        if left > 0:
            open_outputs[request_id] = left
        else:
            open_outputs.pop(request_id, None)


def _client_of_sequence(sequence_id: Any) -> Any:
    """Of an array of them, an array."""
    return client_of(split_sequence_id(sequence_id)[0])


def parts_of(outputs: EngineOutputs) -> dict[int, EngineOutputs]:
    """One step's output by client; whole where it is all for one."""
    of_tokens = _client_of_sequence(outputs.sequence_ids)
    entries: tuple[Any, ...] = (
        *outputs.starts,
        *outputs.firsts,
        *outputs.ends,
        *outputs.logprobs,
        *outputs.prompt_logprobs,
        *outputs.vectors,
    )
    numbers = {*of_tokens.tolist(), *(_client_of_sequence(entry.sequence_id) for entry in entries)}
    if len(numbers) == 1:
        return {numbers.pop(): outputs}
    return {number: _part(outputs, number, of_tokens == number) for number in sorted(numbers)}


def _part(outputs: EngineOutputs, number: int, is_token_of: Any) -> EngineOutputs:
    def own(entries: list[Any]) -> list[Any]:
        return [entry for entry in entries if _client_of_sequence(entry.sequence_id) == number]

    return EngineOutputs(
        step=outputs.step,
        sequence_ids=outputs.sequence_ids[is_token_of],
        token_ids=outputs.token_ids[is_token_of],
        starts=own(outputs.starts),
        firsts=own(outputs.firsts),
        ends=own(outputs.ends),
        logprobs=own(outputs.logprobs),
        prompt_logprobs=own(outputs.prompt_logprobs),
        vectors=own(outputs.vectors),
    )
