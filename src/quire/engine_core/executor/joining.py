"""How ranks of several machines find each other: each tells the core where its sockets are, and the core tells all.

    rank ---- Fact(key, value) ----> core ---- the same ----> every other rank
    rank ---- Joined --------------> core                     once it is connected with all of its groups

It happens once, before the model is loaded, on the channels that carry steps afterwards.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from quire.engine_core.executor.placement import Rank, RankChannel
from quire.engine_core.executor.rank_channel import Fact, Failed, Joined, encode_message
from quire.errors import EngineError

_LOOK_SECONDS = 0.02
T = TypeVar("T")


class RankFacts:
    """A rank's side, until it is joined."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._known: dict[str, bytes] = {}

    def tell(self, key: str, value: bytes) -> None:
        self._known[key] = value
        self._channel.send(encode_message(Fact(key, value)))

    def hear(self, key: str) -> bytes:
        while key not in self._known:
            message = self._channel.receive()
            assert isinstance(message, Fact)
            self._known[message.key] = message.value
        return self._known[key]


class CoreFacts:
    """That of rank 0, which is joined by another thread than the one that has the channels."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._known: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.told: queue.SimpleQueue[Fact] = queue.SimpleQueue()

    def tell(self, key: str, value: bytes) -> None:
        self.learn(Fact(key, value))
        self.told.put(Fact(key, value))

    def learn(self, fact: Fact) -> None:
        with self._changed:
            self._known[fact.key] = fact.value
            self._changed.notify_all()

    def hear(self, key: str) -> bytes:
        with self._changed:
            while key not in self._known:
                if self._is_over():
                    raise EngineError("a rank was lost while they were joined.")
                self._changed.wait(_LOOK_SECONDS)
            return self._known[key]


def join_all(ranks: list[Rank], join_first: Callable[[CoreFacts], T], is_over: Callable[[], bool]) -> T:
    """What `join_first` returns, once all ranks are joined."""
    facts = CoreFacts(is_over)
    results: list[T | BaseException] = []

    def run() -> None:
        try:
            results.append(join_first(facts))
        except BaseException as error:
            results.append(error)

    threading.Thread(target=run, name="quire-joining", daemon=True).start()
    everything: list[Fact] = []
    # who has said something is connected; so many facts it has been told
    num_told: dict[int, int] = {}
    waiting = {rank.number for rank in ranks}
    while waiting or not results:
        if is_over():
            raise EngineError("a rank was lost while they were joined.")
        while not facts.told.empty():
            everything.append(facts.told.get())
        for rank in ranks:
            message = rank.channel.receive(_LOOK_SECONDS if rank.number in waiting else 0.0)
            if isinstance(message, Failed):
                raise EngineError(f"rank {rank.number} could not be joined: {message.text}")
            if isinstance(message, Fact):
                facts.learn(message)
                everything.append(message)
            elif isinstance(message, Joined):
                waiting.discard(rank.number)
            if message is not None:
                num_told.setdefault(rank.number, 0)
            if rank.number in waiting and rank.number in num_told:
                for fact in everything[num_told[rank.number] :]:
                    rank.channel.send(encode_message(fact))
                num_told[rank.number] = len(everything)
    result = results[0]
    if isinstance(result, BaseException):
        raise result
    return result
