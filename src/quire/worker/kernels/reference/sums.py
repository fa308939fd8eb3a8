"""The order in which parts are added up that several ranks may have between them."""

from __future__ import annotations

from torch import Tensor


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Of parts 0 and 1, of 2 and 3, then of these two sums, and so on; whoever has a branch gets its very bits."""
    stack: list[Tensor] = []
    for number, part in enumerate(parts):
        total = part
        while number & 1:
            total = stack.pop() + total
            number >>= 1
        stack.append(total)
    while len(stack) > 1:
        last = stack.pop()
        stack.append(stack.pop() + last)
    return stack[0]
