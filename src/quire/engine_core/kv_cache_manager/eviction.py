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

# Of blocks that no tenant has named: pinned prefixes, and all where nobody has a name.
NOBODY = ""


class EvictionOrder(Protocol):
    """The cached blocks."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, block: object) -> bool: ...
    def __setitem__(self, block: int, nothing: None) -> None:
        """Cached from now on; used last of all."""

    def __delitem__(self, block: int) -> None: ...
    def clear(self) -> None:
        """Nothing is cached, and no block has a name any more."""

    def evicted(self) -> int:
        """The one that goes; it is cached no more."""


def eviction_order(num_blocks: int, share: float | None) -> EvictionOrder:
    """`share`: what part of all blocks a tenant may have named before its own go first; None: nobody asks whose."""
    return LeastRecentlyUsed() if share is None else ByShares(num_blocks, share)


class LeastRecentlyUsed(OrderedDict[int, None]):
    """Whoever they belong to."""

    def evicted(self) -> int:
        return self.popitem(last=False)[0]


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

    def __setitem__(self, block: int, nothing: None) -> None:
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
