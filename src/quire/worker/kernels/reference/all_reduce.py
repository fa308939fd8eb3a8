"""What ranks compute together in memory that they share, whose layout `csrc/cpu/operators_ranks.cpp` draws."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from quire.worker.kernels.reference.sums import tree_sum

HEAD_BYTES = 8192
_LINE = 64
# by the address of memory that a rank has to itself: fills the places of the others (turn, bytes of each)
relays: dict[int, Callable[[int, int], None]] = {}


def places_of(meeting: Tensor, size: int) -> Tensor:
    """[turn, rank, bytes]: where ranks leave what they bring."""
    capacity = _capacity(meeting, size)
    return meeting[HEAD_BYTES : HEAD_BYTES + 2 * size * capacity].view(2, size, capacity)


def share_of(total: int, rank: int, size: int) -> range:
    """The rank's among so many columns or rows, as even as they can be."""
    return range(total * rank // size, total * (rank + 1) // size)


def all_reduce(x: Tensor, bias: Tensor | None, meeting: Tensor, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what every rank brings, plus `bias`, in float32 and rounded once; all bring the same shape.

    Returns with any content once `meeting` says that it is aborted: who shares it looks at that.
    """
    pieces = []
    for piece in x.detach().flatten().float().cpu().split(_capacity(meeting, size) // 4):
        brought = _exchange(piece.view(torch.uint8), meeting, rank, size)
        pieces.append(tree_sum(list(brought.view(torch.float32))))
    total = torch.cat(pieces).view(x.shape).to(x.device) if pieces else x.float()
    return (total if bias is None else total + bias.float()).to(dtype)


def all_gather(x: Tensor, meeting: Tensor, rank: int, size: int, total: int) -> Tensor:
    """[..., total]: the columns that every rank brings side by side, each its `share_of` them."""
    shares = [share_of(total, other, size) for other in range(size)]
    rows = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1]).cpu()
    out = rows.new_empty(len(rows), total)
    widest, capacity = max(map(len, shares)), _capacity(meeting, size) // x.element_size()
    # rows or columns that a place has no room for go in pieces
    num_columns = min(widest, capacity)
    num_rows = capacity // num_columns if widest else 1
    for first_row in range(0, len(rows), num_rows):
        for first in range(0, widest, num_columns):
            piece = rows[first_row : first_row + num_rows, first : first + num_columns]
            own = rows.new_zeros(len(rows[first_row : first_row + num_rows]), num_columns)
            own[:, : piece.shape[1]] = piece
            brought = _exchange(own.view(-1).view(torch.uint8), meeting, rank, size).view(x.dtype)
            for share, part in zip(shares, brought.view(size, -1, num_columns), strict=True):
                columns = share[first : first + num_columns]
                out[first_row : first_row + num_rows, columns.start : columns.stop] = part[:, : len(columns)]
    return out.view(*x.shape[:-1], total).to(x.device)


def _capacity(meeting: Tensor, size: int) -> int:
    """Bytes of a place."""
    return (len(meeting) - HEAD_BYTES) // (2 * size) // _LINE * _LINE


def _exchange(own: Tensor, meeting: Tensor, rank: int, size: int) -> Tensor:
    """[size, bytes]: what every rank brings, which fits into a place."""
    counts = meeting[:HEAD_BYTES].view(torch.int32).view(-1, _LINE // 4)[:, 0]
    turn = int(counts[1 + rank]) & 1
    of_turn = places_of(meeting, size)[turn, :, : len(own)]
    of_turn[rank] = own
    relay = relays.get(meeting.data_ptr())
    if relay is not None:
        relay(turn, len(own))
        counts[1 : 1 + size] += 1
    else:
        counts[1 + rank] += 1
    while int((counts[1 : 1 + size] - counts[1 + rank]).min()) < 0 and not int(counts[0]):
        time.sleep(0)
    return of_turn.clone()
