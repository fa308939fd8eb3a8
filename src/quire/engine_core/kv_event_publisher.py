"""Publishes events of the prefix cache over ZeroMQ, in vLLM's form: who subscribes hears which blocks come and go.

    PUB      (topic, number of the batch as 8 bytes, the batch)
    ROUTER   asked with a number: (number, batch) for all from there on that are kept, then (-1, nothing)

The engine's loop only puts batches into a queue. A thread of its own packs and sends them. What does not fit into the
queue, or into that of a subscriber who is slow, is lost for whom it is, and the gap in the numbers says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq

from quire.config.kv_events import KVEventsConfig
from quire.config.network_addresses import is_of_all_networks
from quire.errors import OptionError
from quire.kv_events import KVEvent, packed

logger = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_END_SECONDS = 1.0
_LONGEST_QUESTION = 4096
# of one that asks for events again, before the first of them is answered
_MOST_QUESTIONS = 4


class KVEventPublisher:
    """Of one engine core."""

    def __init__(self, config: KVEventsConfig, replica: int = 0) -> None:
        self._config = config
        self._replica = replica
        self._topic = config.topic.encode()
        self._queue: deque[tuple[int, float, Sequence[KVEvent]]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._is_closing = False
        self.num_lost = 0
        self._context = zmq.Context()
        try:
            self._pub = self._bound(zmq.PUB, config.endpoint, config.hwm)
            # one answer has room: who asks again before it has read it loses of the next
            most = min(config.hwm, config.buffer_steps + _MOST_QUESTIONS)
            self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, most) if config.replay_endpoint else None
            # the loop rings, the thread sleeps at the other end
            self._bell = self._context.socket(zmq.PAIR)
            self._bell.set_hwm(1)
            self._bell.bind("inproc://bell")
        except BaseException:
            self._context.destroy(0)
            raise
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Never waits."""
        number = self._next
        self._next += 1
        if len(self._queue) >= self._config.max_queue_size:
            self.num_lost += 1
            if self.num_lost == 1:
                logger.warning(
                    "KV events come faster than they can be sent: batches are lost from number %d on", number
                )
            return
        self._queue.append((number, time.time(), events))
        self._ring()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._ring()
        self._thread.join(_END_SECONDS)
        self._bell.close(0)
        if not self._thread.is_alive():
            self._context.term()

    def _bound(self, kind: int, endpoint: str, most_waiting: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.sndhwm = most_waiting
        socket.rcvhwm = _MOST_QUESTIONS
        socket.linger = 0
        # of what comes: a question, or what a subscriber wants to hear of
        socket.maxmsgsize = _LONGEST_QUESTION
        socket.ipv6 = "[" in endpoint
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OptionError(
                f"kv_events_config: {endpoint} cannot be listened on ({error.strerror}). Choose a free port of this "
                "machine."
            ) from error
        host = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")[0]
        assert not is_of_all_networks(host), "it was checked when the options were"
        return socket

    def _ring(self) -> None:
        try:
            self._bell.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            return  # it has been rung and not been heard yet

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        bell: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        bell.set_hwm(1)
        bell.connect("inproc://bell")
        poller = zmq.Poller()
        poller.register(bell, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._is_closing:
            heard: dict[Any, int] = dict(poller.poll())
            if bell in heard:
                bell.recv()
            self._send_all()
            if self._replay is not None and self._replay in heard:
                self._answer(self._replay)
        self._send_all()
        for socket in filter(None, (bell, self._pub, self._replay)):
            socket.close(0)

    def _send_all(self) -> None:
        while self._queue:
            number, when, events = self._queue.popleft()
            batch = packed(events, when, self._replica, as_maps=self._config.as_maps)
            # a PUB socket never waits: who is slow loses it
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), batch))
            self._kept.append((number, batch))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """One question. Who does not read the answer loses the rest of it."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a question for KV events of %d frames is none", len(frames))
            return
        whom, _, first = frames
        start = int.from_bytes(first, "big")
        for number, batch in self._kept:
            if number >= start:
                replay.send_multipart((whom, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((whom, b"", _END, b""))
