"""What several ranks compute together (4.3.1), each operator called by all of them at the same place of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.worker.kernels import operators
from quire.worker.kernels.reference.all_reduce import HEAD_BYTES
from quire.worker.kernels.reference.send_and_receive import NUM_SLOTS

# of a place in which a rank leaves what it brings; what is longer goes in pieces
_PLACE_BYTES = 1 << 20


def meeting_bytes(size: int) -> int:
    """How much zeroed memory so many ranks must share."""
    return HEAD_BYTES + 2 * size * _PLACE_BYTES


def all_reduce(x: Tensor, bias: Tensor | None, meeting: Tensor, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what all ranks bring, plus `bias` once, in float32 and then rounded to `dtype`."""
    return operators.all_reduce(x, bias, meeting, rank, size, dtype)


def all_gather(x: Tensor, meeting: Tensor, rank: int, size: int, total: int) -> Tensor:
    """What all ranks bring side by side: of `total` columns each brings the `share_of` it."""
    return operators.all_gather(x, meeting, rank, size, total)


def link_bytes(num_stages: int) -> int:
    """How much zeroed memory the stages of a pipeline must share. What is never used is never there."""
    return HEAD_BYTES + (num_stages - 1) * NUM_SLOTS * _PLACE_BYTES


def send(x: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """The bytes of x to the next stage, which asks for as many. Waits only where that one is far behind."""
    operators.send(x.contiguous().view(-1).view(torch.uint8), meeting, link, num_links)


def receive(out: Tensor, meeting: Tensor, link: int, num_links: int) -> None:
    """What the stage before sends, into all of `out`, which is contiguous; any content once `meeting` is aborted."""
    operators.receive(out.view(-1).view(torch.uint8), meeting, link, num_links)
