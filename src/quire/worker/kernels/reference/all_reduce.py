"""A sum over ranks that share memory, whose layout `csrc/cpu/operators_ranks.cpp` draws."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from quire.worker.kernels.reference.sums import tree_sum

HEAD_BYTES = 8192
_LINE = 64


def all_reduce(x: Tensor, bias: Tensor | None, meeting: Tensor, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of what every rank brings, plus `bias`, in float32 and rounded once; all bring the same shape.

    Returns with any content once `meeting` says that it is aborted: who shares it looks at that.
    """
    counts = meeting[:HEAD_BYTES].view(torch.int32).view(-1, _LINE // 4)[:, 0]
    capacity = (len(meeting) - HEAD_BYTES) // (2 * size) // _LINE * _LINE
    places = meeting[HEAD_BYTES : HEAD_BYTES + 2 * size * capacity].view(2, size, capacity).view(torch.float32)
    pieces = []
    for piece in x.detach().flatten().float().cpu().split(capacity // 4):
        count = int(counts[1 + rank])
        of_turn = places[count & 1, :, : len(piece)]
        of_turn[rank] = piece
        counts[1 + rank] += 1
        while int((counts[1 : 1 + size] - counts[1 + rank]).min()) < 0 and not int(counts[0]):
            time.sleep(0)
        pieces.append(tree_sum([part.clone() for part in of_turn]))
    total = torch.cat(pieces).view(x.shape).to(x.device) if pieces else x.float()
    return (total if bias is None else total + bias.float()).to(dtype)
