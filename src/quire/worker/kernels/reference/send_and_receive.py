"""Bytes from one stage to the next in memory that they share, whose layout `csrc/cpu/operators_stages.cpp` draws."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from quire.worker.kernels.reference.all_reduce import HEAD_BYTES

NUM_SLOTS = 16
_LINE = 64
_FIRST_LINK_LINE = 65


def send(x: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """A vector of bytes, slot by slot; waits where all slots are full."""
    sent, taken, slots = _link(meeting, link, num_links)
    for piece in x.cpu().split(slots.shape[1]):
        count = int(sent)
        _wait(meeting, taken, count + 1 - NUM_SLOTS)
        slots[count % NUM_SLOTS, : len(piece)] = piece
        sent += 1


def receive(out: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """Fills a vector of bytes; waits where there is nothing."""
    sent, taken, slots = _link(meeting, link, num_links)
    for piece in out.split(slots.shape[1]):
        count = int(taken)
        _wait(meeting, sent, count + 1)
        piece.copy_(slots[count % NUM_SLOTS, : len(piece)])
        taken += 1


def _link(meeting: Tensor, link: int, num_links: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many slots were sent and taken, and the slots themselves."""
    counts = meeting[:HEAD_BYTES].view(torch.int32).view(-1, _LINE // 4)[:, 0]
    sent, taken = counts[_FIRST_LINK_LINE + 2 * link : _FIRST_LINK_LINE + 2 * link + 2]
    slot_bytes = (len(meeting) - HEAD_BYTES) // (num_links * NUM_SLOTS) // _LINE * _LINE
    slots = meeting[HEAD_BYTES : HEAD_BYTES + num_links * NUM_SLOTS * slot_bytes].view(num_links, NUM_SLOTS, slot_bytes)
    return sent, taken, slots[link]


def _wait(meeting: Tensor, count: Tensor, least: int) -> None:
    """Until it is as much, or nobody will come."""
    is_aborted = meeting[:4].view(torch.int32)
    while int(count) < least and not int(is_aborted):
        time.sleep(0)
