"""Which cached block goes when none is free: the least recently used one of all, or of whoever has more than its share.

Owns the order of the cached blocks (count 0, content known). Whose a block is, is settled when it gets its name, and
holds while it has one. With shares a tenant's use is all its named blocks, held and cached alike: one that fills the
cache with its running requests must not push out what others have cached before its own. Called by the block pool.

    named blocks     A A A A A A A A A A B B B C      most = 4: A is over it, so A's least recently used block goes,
    of them cached       A A A     A A   B B   C      even if one of B was not used for longer
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

import numpy as np

# Of blocks that no tenant has named: pinned prefixes, and all where nobody has a name.
NOBODY = ""


class EvictionOrder(Protocol):
    """The cached blocks."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, block: object) -> bool: ...
    def extend(self, blocks: list[int]) -> None:
        """Cached from now on, and used last of all, in this order."""

    def __delitem__(self, block: int) -> None: ...
    def clear(self) -> None:
        """Nothing is cached, and no block has a name any more."""

    def evicted(self) -> int:
        """Takes out the one that goes; it is cached no more."""


def eviction_order(num_blocks: int, share: float | None) -> EvictionOrder:
    """`share`: what part of all blocks a tenant may have named before its own go first; None: nobody asks whose."""
    return LeastRecentlyUsed(num_blocks) if share is None else ByShares(num_blocks, share)


class LeastRecentlyUsed:
    """Whoever they belong to: a ring of places, each of which knows the one before and behind it. Eight bytes a block,
    where an OrderedDict takes a hundred and more."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        # block i has place i + 1, and the ring begins and ends at its head; 0: the block is not cached
        self._head = self._num_blocks + 1
        self._behind = np.zeros(self._num_blocks + 2, dtype=np.int32).data
        self._before = np.zeros(self._num_blocks + 2, dtype=np.int32).data
        self._behind[self._head] = self._before[self._head] = self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        place = self._behind[self._head]
        while place != self._head:
            yield place - 1
            place = self._behind[place]

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self._behind[block + 1] != 0

    def extend(self, blocks: list[int]) -> None:
        behind = self._behind
        before = self._before
        last = before[self._head]
        for block in blocks:
            place = block + 1
            behind[last] = place
            before[place] = last
            last = place
        behind[last] = self._head
        before[self._head] = last
        self._length += len(blocks)

    def __delitem__(self, block: int) -> None:
        place = block + 1
        behind = self._behind[place]
        before = self._before[place]
        self._behind[before] = behind
        self._before[behind] = before
        self._behind[place] = 0
        self._length -= 1

    def evicted(self) -> int:
        block: int = self._behind[self._head] - 1
        del self[block]
        return block


class ByShares:
    """First of who is over the share, of them who has most; else of all."""

    def __init__(self, num_blocks: int, share: float) -> None:
        self._most = share * num_blocks
        self._owners: list[str | None] = [None] * num_blocks
        # named blocks of each, held or cached
        self._counts: dict[str, int] = {}
        # who has more than the share: few, because shares add up. A dict, whose order is that of the events
        self._over: dict[str, None] = {}
        # by block, who had named it; least recently used first, of all and of each owner
        self._all: OrderedDict[int, str] = OrderedDict()
        self._by_owner: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __contains__(self, block: object) -> bool:
        return block in self._all

    def extend(self, blocks: list[int]) -> None:
        for block in blocks:
            owner = self._owners[block]
            assert owner is not None, "a cached block has a name"
            self._all[block] = owner
            self._by_owner.setdefault(owner, OrderedDict())[block] = None

    def __delitem__(self, block: int) -> None:
        owner = self._all.pop(block)
        blocks = self._by_owner[owner]
        del blocks[block]
        if not blocks:
            del self._by_owner[owner]

    def clear(self) -> None:
        self._owners = [None] * len(self._owners)
        for content in (self._counts, self._over, self._all, self._by_owner):
            content.clear()

    def evicted(self) -> int:
        over = [owner for owner in self._over if owner in self._by_owner]
        blocks = self._by_owner[max(over, key=self._counts.__getitem__)] if over else self._all
        block = next(iter(blocks))
        del self[block]
        return block

    def named(self, block: int, owner: str) -> None:
        self._owners[block] = owner
        self._count(owner, 1)

    def unnamed(self, block: int) -> None:
        owner, self._owners[block] = self._owners[block], None
        assert owner is not None, "a block had no name"
        self._count(owner, -1)

    def _count(self, owner: str, change: int) -> None:
        count = self._counts.get(owner, 0) + change
        if count:
            self._counts[owner] = count
        else:
            del self._counts[owner]
        if count > self._most:
            self._over[owner] = None
        else:
            self._over.pop(owner, None)

    def check_invariants(self, named: list[int]) -> None:
        assert sorted(named) == [block for block, owner in enumerate(self._owners) if owner is not None]
        counts = {owner: self._owners.count(owner) for owner in {*self._owners} if owner is not None}
        assert self._counts == counts, "named blocks were counted wrongly"
        assert set(self._over) == {owner for owner, count in self._counts.items() if count > self._most}
        by_owner: dict[str, list[int]] = {}
        for block, owner in self._all.items():
            by_owner.setdefault(owner, []).append(block)
        found = {owner: list(blocks) for owner, blocks in self._by_owner.items()}
        assert found == by_owner, "a cached block is not its owner's, or two orders differ"
