"""What several ranks compute together (4.3.1), each operator called by all of them at the same place of the model."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.cpu import library
from quire.worker.kernels.reference.all_reduce import HEAD_BYTES, places_of, relays
from quire.worker.kernels.reference.send_and_receive import NUM_SLOTS

# of a place in which a rank leaves what it brings; what is longer goes in pieces
_PLACE_BYTES = 1 << 20


class SumRelay(Protocol):
    """The way to those ranks of a group that are on other machines."""

    def gather(self, places_RB: Tensor) -> None:
        """What each rank brings to its own place, into those of all; any content once the memory is aborted."""


class LinkRelay(Protocol):
    """The same between stages."""

    def send(self, x: Tensor, link: int) -> None:
        """A vector of bytes."""

    def receive(self, out: Tensor, link: int) -> None:
        """As many bytes as `out` has; any content once the memory is aborted."""


# by the address of memory that this rank has to itself
_links: dict[int, LinkRelay] = {}
# what C++ calls must not be collected
_callbacks: dict[int, object] = {}


def relay_sums(relay: SumRelay, meeting: Tensor, size: int) -> None:
    """From now on the operators reach the others by `relay` where they are given this memory."""
    places = places_of(meeting, size)

    def fill(turn: int, num_bytes: int) -> None:
        relay.gather(places[turn, :, :num_bytes])

    address = meeting.data_ptr()
    relays[address] = fill
    if library.load():
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(fill)
        library.loaded().quire_set_relay(ctypes.c_void_p(address), callback)
        _callbacks[address] = callback


def relay_links(relay: LinkRelay, meeting: Tensor) -> None:
    """The same of what goes from stage to stage."""
    _links[meeting.data_ptr()] = relay


def meeting_bytes(size: int) -> int:
    """How much zeroed memory so many ranks must share."""
    return HEAD_BYTES + 2 * size * _PLACE_BYTES


def link_bytes(num_stages: int) -> int:
    """How much zeroed memory the stages of a pipeline must share. What is never used is never there."""
    return HEAD_BYTES + (num_stages - 1) * NUM_SLOTS * _PLACE_BYTES


def send(x: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """The bytes of x to the next stage, which asks for as many. Waits only where that one is far behind."""
    data = x.contiguous().view(-1).view(torch.uint8)
    relay = _links.get(meeting.data_ptr())
    if relay is not None:
        return relay.send(data, link)
    return operators.send(data, meeting, link, num_links)


def receive(out: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """What the stage before sends, into all of `out`, which is contiguous; any content once `meeting` is aborted."""
    data = out.view(-1).view(torch.uint8)
    relay = _links.get(meeting.data_ptr())
    if relay is not None:
        return relay.receive(data, link)
    return operators.receive(data, meeting, link, num_links)
