"""Ranks of several machines: torch.distributed (gloo) carries what those of one machine leave in shared memory.

    operator ---- own place filled ----> SumCrossing -- gloo --> the same place on every other machine

A rank has the memory of such a group to itself, and the operators work on it as on any other: the same sums in the same
order, hence the same bits. Here the places of the others are filled. Addresses of gloo's sockets are exchanged by
whoever started the ranks (FactStore): no store listens anywhere. Gloo listens at the given address only, and knows no
keys: whoever reaches it from elsewhere is between machines that trust their network.
"""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from quire.worker.kernels.reference.all_reduce import HEAD_BYTES

# How often one that waits looks whether anybody will come.
_LOOK = timedelta(seconds=0.1)
# Gloo itself gives up after this long: a rank may load a model meanwhile.
_LONGEST = timedelta(hours=1)
_LINE_INTS = 16
# Sent and not yet taken.
_MOST_UNDER_WAY = 16
# What memory says that is aborted for this reason; otherwise 1.
CONNECTION_LOST = 2
logger = logging.getLogger(__name__)


class Facts(Protocol):
    """What ranks tell each other before they are joined."""

    def tell(self, key: str, value: bytes) -> None: ...

    def hear(self, key: str) -> bytes:
        """Waits until somebody has told it."""


class FactStore(dist.Store):
    """What gloo believes to be a store: it asks for the addresses of its peers."""

    def __init__(self, prefix: str, facts: Facts) -> None:
        super().__init__()
        self._prefix = prefix
        self._facts = facts

    def set(self, key: str, value: Any) -> None:
        self._facts.tell(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._facts.hear(self._prefix + key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class Joint:
    """The part of a rank in some gloo groups, and how it waits there. Used by one thread."""

    def __init__(self, meeting: Tensor, rank: int, facts: Facts, host_ip: str) -> None:
        """`rank`: this one's number among those that have such memory."""
        head = meeting[:HEAD_BYTES].view(torch.int32).view(-1, _LINE_INTS)
        self._rank = rank
        self._aborted = head[0]
        # who looks at the memory sees by it that this rank waits for others
        self._line = head[1 + rank]
        self._facts = facts
        self._host_ip = host_ip

    def group(self, name: str, rank: int, size: int) -> Any:
        """Returns once all of them are joined."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host_ip)]
        options._timeout = _LONGEST
        return dist.ProcessGroupGloo(FactStore(f"{name}/", self._facts), rank, size, options)

    def wait(self, work: Any) -> None:
        """Until it is done, or nobody will come: then the memory says so, and what was to be filled has any content."""
        self._line[1] += 1
        try:
            while not int(self._aborted[0]) and not _is_done(work):
                pass
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.error("rank %d of a group has lost another one: %s", self._rank, reason)
            self._aborted[0] = CONNECTION_LOST
        finally:
            self._line[1] -= 1


class SumCrossing:
    """A group that computes sums together, not all of it on this machine."""

    def __init__(self, meeting: Tensor, members: list[int], rank: int, facts: Facts, host_ip: str) -> None:
        """`rank`: this one's number among the members."""
        self._rank = rank
        self._joint = Joint(meeting, rank, facts, host_ip)
        self._group = self._joint.group(str(members), rank, len(members))

    def gather(self, places_RB: Tensor) -> None:
        """What each rank brings to its own place, into those of all."""
        self._joint.wait(self._group.allgather([list(places_RB)], [places_RB[self._rank].clone()]))


class StageCrossing:
    """The stages of a pipeline, not all of them on this machine: a group of two for each link."""

    def __init__(self, meeting: Tensor, members: list[int], rank: int, facts: Facts, host_ip: str) -> None:
        self._joint = Joint(meeting, rank, facts, host_ip)
        self._links = {
            link: self._joint.group(f"{members}/{link}", rank - link, 2)
            for link in range(len(members) - 1)
            if rank in (link, link + 1)
        }
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, x: Tensor, link: int) -> None:
        """A vector of bytes to the other end. Returns at once, unless that one is far behind."""
        self._under_way.append((_broadcast(self._links[link], x), x))
        while len(self._under_way) > _MOST_UNDER_WAY or (self._under_way and self._under_way[0][0].is_completed()):
            self._joint.wait(self._under_way.popleft()[0])

    def receive(self, out: Tensor, link: int) -> None:
        """As many bytes as `out` has."""
        self._joint.wait(_broadcast(self._links[link], out))


def _broadcast(group: Any, x: Tensor) -> Any:
    """From the first of two to the other: unlike gloo's own send and receive it can be waited for in vain."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([x], options)


def _is_done(work: Any) -> bool:
    try:
        work.wait(_LOOK)
    except RuntimeError:
        if not work.is_completed():
            return False
        # it may have been done in the moment after the look was over, which is no fault
        if not work.is_success():
            raise
    return True
