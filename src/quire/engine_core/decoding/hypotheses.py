"""Hypotheses as a tree: beams share their beginnings as sequences share blocks, so a step adds one node a beam.

A node that only one living leaf descends from is *settled*: whatever comes, every output begins with it. Settled tokens
can be shown to the client at once; nothing that was shown is ever taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.messages import TokenLogprobs


class Node:
    """One token of a hypothesis, and where it grew from."""

    __slots__ = ("children", "is_leaf", "logprobs", "parent", "token_id")

    def __init__(self, parent: Node | None, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self.parent = parent
        self.token_id = token_id
        self.logprobs = logprobs
        # by identity; a step adds few
        self.children: list[Node] = []
        # a running beam or a finished hypothesis ends here
        self.is_leaf = True

    def grow(self, token_id: int, logprobs: TokenLogprobs) -> Node:
        child = Node(self, token_id, logprobs)
        self.children.append(child)
        return child

    def leave(self) -> None:
        """No beam ends here any more; branches that lead nowhere are cut."""
        self.is_leaf = False
        node = self
        while not node.children and not node.is_leaf and node.parent is not None:
            node.parent.children.remove(node)
            node = node.parent

    def path_from(self, ancestor: Node) -> list[Node]:
        """The nodes behind an ancestor, down to this one."""
        path = []
        node = self
        while node is not ancestor:
            path.append(node)
            assert node.parent is not None, "not an ancestor"
            node = node.parent
        return path[::-1]


@dataclass(frozen=True)
class Hypothesis:
    """A finished output: its last node, its score with the length penalty, and why it ended."""

    node: Node
    score: float
    finish_reason: str
    stop_reason: int | None = None


def settled_from(node: Node) -> list[Node]:
    """The nodes behind this one that every leaf descends from."""
    path = []
    while not node.is_leaf and len(node.children) == 1:
        node = node.children[0]
        path.append(node)
    return path
