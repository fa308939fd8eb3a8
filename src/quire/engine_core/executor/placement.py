"""Where the ranks of a group run: a process for each, a channel to it, and how they meet.

A placement starts all ranks but the first, which is the core's own process, and ends them. What the core asks a rank,
and whether that one keeps up, is the same wherever it stands.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.config import WorkerConfig
from quire.engine_core.executor.rank_channel import RankMessage, Spilled

if TYPE_CHECKING:
    from quire.worker.layers.ranks import Ranks


class RankProcess(Protocol):
    """The process of a rank, as the core can see it."""

    @property
    def pid(self) -> int:
        """Its number on the machine on which it runs."""

    @property
    def end_descriptor(self) -> int:
        """Readable as soon as it has ended."""

    def how_it_ended(self) -> str: ...

    def close(self) -> None:
        """Ends it, once and for all."""


class RankChannel(Protocol):
    """The core's end of the way to a rank."""

    def send(self, message: bytes) -> None: ...

    def receive(self, seconds: float | None = None) -> RankMessage | None:
        """None: nothing came in time. EOFError: the other end is gone."""

    def close(self) -> None: ...


class Rank:
    """A worker in a process of its own. It answers in the order in which it is asked."""

    def __init__(self, number: int, process: RankProcess, channel: RankChannel) -> None:
        self.number = number
        self.process = process
        self.channel = channel
        self._open: deque[Reply] = deque()

    @property
    def has_work(self) -> bool:
        """It was asked for something and has not answered; of a call nobody knows how long it takes."""
        return any(reply.is_step for reply in tuple(self._open))

    def ask(self, message: bytes) -> Reply:
        reply = Reply(self)
        self._open.append(reply)
        self.channel.send(message)
        return reply

    def wait_for(self, reply: Reply, seconds: float) -> RankMessage | None:
        """None: it did not come in time."""
        while reply.message is None:
            message = self.channel.receive(seconds)
            if message is None:
                return None
            if isinstance(message, Spilled):
                self._open[0].spilled |= message.blocks
            else:
                self._open.popleft().message = message
        return reply.message

    def end(self) -> None:
        self.channel.close()
        self.process.close()


class Reply:
    """What a rank will say."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.is_step = False
        self.message: RankMessage | None = None
        # by the step, as far as this rank has it
        self.spilled: dict[bytes, bytes] = {}


class RankSight(msgspec.Struct, array_like=True):
    """What a process was seen doing."""

    # the processor time that it has had; -1: it has ended
    cpu_ticks: int = -1
    # a signal has stopped it
    is_stopped: bool = False
    # for another rank
    is_waiting: bool = False


class Sight(msgspec.Struct, array_like=True):
    """What there is to be seen at a moment."""

    ranks: dict[int, RankSight] = {}
    # by group: how many times each of its ranks has met the others
    arrivals: dict[tuple[int, ...], list[int]] = {}
    # a connection between ranks on several machines has closed
    has_lost_others: bool = False


class Placement(Protocol):
    """The ranks of a group, started."""

    @property
    def ranks(self) -> list[Rank]:
        """All but the first, in order."""

    def ranks_around_first(self, config: WorkerConfig) -> Ranks:
        """The groups of rank 0, as it sees them; all others have found theirs by then."""

    def num_neighbours(self, rank: int) -> int:
        """How many ranks share its machine, itself among them."""

    @property
    def has_crossings(self) -> bool:
        """Ranks of one group are on several machines, so that nothing shows how often each has met the others."""

    def look(self) -> Sight: ...

    def abort(self) -> None:
        """Nobody waits for another rank from here on."""

    @property
    def is_aborted(self) -> bool: ...

    def close(self) -> None:
        """Ends all of them."""
