"""Room for a result, as an operator so that a recorded program can own the memory."""

from __future__ import annotations

from torch import Tensor


def new_rows(like: Tensor, sizes: list[int]) -> Tensor:
    """An uninitialised tensor of these sizes, in the type and on the device of `like`."""
    return like.new_empty(sizes)
