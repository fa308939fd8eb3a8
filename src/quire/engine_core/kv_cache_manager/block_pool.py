"""The pool of physical blocks: who holds each one, and which known contents can be revived.

A block is free, held (count >= 1), or cached (count 0, content known by its key, revived until it is evicted). A holder
may *offer* what it holds to whoever needs it; a block is within reach if all its holders do so, or if it has none. It
hands out numbers and knows neither sequences nor tokens. Called by the KV cache manager and its parts alone.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from quire.engine_core.block_table import Blocks
from quire.engine_core.kv_cache_manager.cache_changes import BlockKey, CacheChangeLog
from quire.engine_core.kv_cache_manager.eviction import NOBODY, ByShares, EvictionOrder, LeastRecentlyUsed
from quire.engine_core.kv_cache_manager.lost_names import LostNames
from quire.observability.recorder import Recorder

_known_numbers: list[int] = []
# the name of a block whose own one nobody asks for any more
HIDDEN = b""


def _numbers_up_to(count: int) -> list[int]:
    """At least the first so many numbers, each in its place."""
    _known_numbers.extend(range(len(_known_numbers), count))
    return _known_numbers


class BlockPool:
    """Fixed-size blocks with reference counts (3.4.2, 3.4.4). With keeps_contents=False nothing is ever cached."""

    def __init__(
        self,
        num_blocks: int,
        free_order: Sequence[int] | None = None,
        *,
        keeps_contents: bool = True,
        recorder: Recorder | None = None,
        order: EvictionOrder | None = None,
        changes: CacheChangeLog | None = None,
    ) -> None:
        """`order`: which cached block goes first, the least recently used one if nothing is said. `changes`: who is
        told of names that come and go."""
        self.num_blocks = num_blocks
        self.keeps_contents = keeps_contents
        # those of all pools of a process are the same objects, of which a simulation has thousands
        self._numbers = _numbers_up_to(num_blocks)
        self._free = self._numbers[:num_blocks][::-1] if free_order is None else list(reversed(free_order))
        self.counts = np.zeros(num_blocks, dtype=np.int64)
        # of these holders, those that offer the block; and how many blocks have another one
        self._offers = np.zeros(num_blocks, dtype=np.int64)
        self._num_out_of_reach = 0
        # A key in two parts, because a name by itself takes half of the memory. Blocks by name, of each group; names by
        # block; and the group of those that are not of group 0.
        self._blocks: dict[int, dict[bytes, int]] = {0: {}}
        self._names: list[bytes | None] = [None] * num_blocks
        self._group_of: dict[int, int] = {}
        # by `allocate` and `take`, ever
        self.num_taken = 0
        # count 0 and content known
        self._cached: EvictionOrder = LeastRecentlyUsed(num_blocks) if order is None else order
        # told of names where it matters whose a block is
        self._shares = order if isinstance(order, ByShares) else None
        self.num_evictions = 0
        # names that are not to be found any more, or under which another block is
        self.num_names_lost = 0
        self.lost = LostNames(num_blocks)
        # everybody who stands on this pool reports to the same one
        self.recorder = recorder or Recorder()
        self.changes = changes
        if changes is not None:
            changes.attach(self)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_within_reach(self) -> int:
        """Blocks that could be handed out if everybody gave up what it offers."""
        return self.num_blocks - self._num_out_of_reach

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_chunks(self, firsts: Blocks) -> npt.NDArray[np.bool_]:
        """Of each chunk that begins with one of these blocks, and ends with the next, whether all of it is free."""
        is_taken = self.counts > 0
        is_taken[self.cached_blocks()] = True
        return ~np.logical_or.reduceat(is_taken, firsts)

    def is_free(self, first: int, end: int) -> bool:
        """All of these blocks are."""
        return not self.counts[first:end].any() and not any(block in self._cached for block in range(first, end))

    def cached_blocks(self) -> Blocks:
        """In no order. Of two lists that together are all blocks that nobody holds, the shorter one is read."""
        if len(self._cached) <= len(self._free):
            return np.fromiter(self._cached, dtype=np.int64, count=len(self._cached))
        is_cached = self.counts == 0
        is_cached[self._free] = False
        return np.flatnonzero(is_cached)

    @property
    def free_blocks(self) -> list[int]:
        return self._free.copy()

    def count(self, block: int) -> int:
        return int(self.counts[block])

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def within_reach(self, blocks: Blocks) -> Blocks:
        """Those of these that could be handed out then."""
        found: Blocks = blocks[self.counts[blocks] == self._offers[blocks]]
        return found

    def allocate(self, num_blocks: int) -> list[int]:
        """New blocks with count 1; evicts cached ones when none is free. The caller asks `num_available` first."""
        free = self._free
        start = max(0, len(free) - num_blocks)
        blocks = free[start:][::-1]
        del free[start:]
        num_evicted = num_blocks - len(blocks)
        if num_evicted:
            # each of these may give others back
            blocks += [self._free.pop() if self._free else self._evict() for _ in range(num_evicted)]
        self.counts[blocks] = 1
        self.num_taken += num_blocks
        self._num_out_of_reach += num_blocks
        self.recorder.allocated(blocks, num_evicted)
        return blocks

    def take(self, blocks: Blocks) -> None:
        """The same for blocks that the caller has chosen, all of which are free."""
        chosen = set(blocks.tolist())
        self._free = [block for block in self._free if block not in chosen]
        self.counts[blocks] = 1
        self.num_taken += len(chosen)
        self._num_out_of_reach += len(chosen)
        self.recorder.allocated(blocks.tolist(), 0)

    def hold(self, blocks: Blocks) -> None:
        """One more holder for each of these, which are distinct; a cached block is revived."""
        counts = self.counts[blocks]
        revived = blocks[counts == 0].tolist()
        for block in revived:
            del self._cached[block]
        self.counts[blocks] = counts + 1
        self._num_out_of_reach += self._num_offered(blocks, counts)
        if revived:
            self.recorder.revived(revived)

    def release(self, blocks: Blocks) -> None:
        """One holder less for each, in this order: give the deepest block of a chain first, so it is evicted first."""
        counts = self.counts[blocks] - 1
        self.counts[blocks] = counts
        self._num_out_of_reach -= self._num_offered(blocks, counts)
        released = blocks[counts == 0].tolist()
        num_free = len(self._free)
        if self.keeps_contents or any(self._blocks.values()):
            self._give_back(released)
        else:  # none has a name
            self._free += released
        if released:
            self.recorder.released(released, self._free[num_free:])

    def _give_back(self, blocks: list[int]) -> None:
        names = self._names
        named = [block for block in blocks if names[block] is not None]
        if not named:
            self._free += blocks
            return
        if self.keeps_contents:
            self._cached.extend(named)
            blocks = [block for block in blocks if names[block] is None] if len(named) < len(blocks) else []
        else:
            for block in named:
                self.forget(block)
        self._free += blocks

    def offer(self, blocks: Blocks) -> None:
        """One more holder of each of these, which are distinct, would give it up to whoever needs it."""
        self._offers[blocks] += 1
        self._num_out_of_reach -= self._num_offered(blocks, self.counts[blocks])

    def withdraw(self, blocks: Blocks) -> None:
        """One holder less offers each of these: before it releases them, say."""
        self._num_out_of_reach += self._num_offered(blocks, self.counts[blocks])
        self._offers[blocks] -= 1

    def _num_offered(self, blocks: Blocks, counts: Blocks) -> int:
        return int(np.count_nonzero(counts == self._offers[blocks]))

    def find(self, key: BlockKey) -> int | None:
        """A pure look-up: takes no reference."""
        group, name = key
        blocks = self._blocks.get(group)
        return None if blocks is None else blocks.get(name)

    def length_of_chain(self, group: int, contents: Iterable[bytes]) -> int:
        """How many of these, from the first on, are there."""
        length = 0
        blocks = self._blocks.get(group, {})
        for content in contents:
            if content not in blocks:
                break
            length += 1
        return length

    def key_of(self, block: int) -> BlockKey | None:
        name = self._names[block]
        return None if name is None else (self._group_of.get(block, 0), name)

    def names(self, group: int) -> KeysView[bytes]:
        """That blocks of this group have."""
        return self._blocks.get(group, {}).keys()

    def register(self, block: int, key: BlockKey, owner: str = NOBODY) -> bool:
        """The block's content is known from now on, and whose it is. False: somebody holds another one with the same
        content, and this one stays anonymous. A twin that nobody holds makes way: who follows would revive it, and so
        take a block more out of the pool than one who shares what was just computed, which is what estimates count
        on."""
        if self._names[block] is not None:
            return False
        group, name = key
        blocks = self._blocks.get(group)
        # not by `find`: each block that fills up comes by here
        twin = blocks.get(name) if blocks is not None else None
        if twin is not None:
            if twin not in self._cached:
                return False
            self.discard(twin)
        self._name(block, key, owner)
        return True

    def claim(self, block: int, key: BlockKey) -> None:
        """The block is the one to be found under this key from now on; a twin becomes anonymous."""
        twin = self.find(key)
        if twin is not None and twin != block:
            self.discard(twin)
        if self._names[block] is None:
            self._name(block, key, NOBODY)

    def _name(self, block: int, key: BlockKey, owner: str) -> None:
        group, name = key
        self._names[block] = name
        self._blocks.setdefault(group, {})[name] = self._numbers[block]
        if group:
            self._group_of[block] = group
        if self._shares is not None:
            self._shares.named(block, owner)
        if self.changes is not None:
            self.changes.named(key)

    def forget(self, block: int) -> None:
        """The content of a held block is not to be found any more."""
        name = self._names[block]
        if name is not None:
            self.num_names_lost += 1
            group = self._group_of.pop(block, 0)
            if name != HIDDEN:
                del self._blocks[group][name]
            self._names[block] = None
            if self._shares is not None:
                self._shares.unnamed(block)
            if self.changes is not None:
                self.changes.unnamed((group, name), block)

    def hide(self, names: Sequence[bytes]) -> None:
        """Nobody will ask for these any more. Their blocks stay what they are, and give way in their turn."""
        for blocks in self._blocks.values():
            for name in names:
                block = blocks.pop(name, None)
                if block is not None:
                    self._names[block] = HIDDEN

    def discard(self, block: int) -> None:
        """The same of any block: one that nobody holds is free then."""
        self.forget(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
            self.recorder.forgotten([block])

    def forget_all(self) -> None:
        """Empties the prefix cache; held blocks keep their holders and lose their names."""
        self.recorder.forgotten(list(self._cached))
        self._free.extend(self._cached)
        self._cached.clear()
        keys = [(group, name) for group, blocks in self._blocks.items() for name in blocks]
        self.num_names_lost += len(keys)
        self.lost.add(keys, "cleared")
        self._blocks = {0: {}}
        self._group_of.clear()
        if self.changes is not None:
            self.changes.cleared()
        self._names = [None] * self.num_blocks

    def check_invariants(self, holders: Blocks, offers: Blocks | None = None) -> None:
        """`holders` counts, for each block, the entries of all block tables, `offers` those of who would give it up."""
        offers = np.zeros(self.num_blocks, dtype=np.int64) if offers is None else offers
        if np.count_nonzero(self.counts != holders):
            wrong = np.flatnonzero(self.counts != holders).tolist()
            raise AssertionError(f"blocks {wrong}: counts {self.counts[wrong]}, holders {holders[wrong]}")
        assert not np.count_nonzero(self._offers != offers), "a block is offered by other holders than are known"
        assert self._num_out_of_reach == np.count_nonzero(holders > offers), "blocks out of reach were counted wrongly"
        # objects that the lists have, too: what is the same is compared fastest
        unheld = list(compress(self._numbers, (holders == 0).tolist()))
        assert sorted([*self._free, *self._cached]) == unheld, "free, cached and held blocks do not make up the pool"
        entries = [(block, (group, name)) for group, by_name in self._blocks.items() for name, block in by_name.items()]
        named = [block for block, _ in entries]
        num_named = self.num_blocks - self._names.count(None)
        # most pools have none of these, and this runs after every step of a test
        if num_named > len(named):
            named += [block for block, name in enumerate(self._names) if name == HIDDEN]
        assert all(self.key_of(block) == key for block, key in entries), "keys and blocks do not match"
        assert num_named == len(named), "a block has a key that is not its own"
        assert None not in map(self._names.__getitem__, self._cached), "a cached block has no key"
        if self._shares is not None:
            self._shares.check_invariants(named)
        assert self.keeps_contents or not len(self._cached), "contents are cached that nobody may find"

    def _evict(self) -> int:
        block = self._cached.evicted()
        key = self.key_of(block)
        assert key is not None
        self.lost.add((key,), "evicted")
        self.forget(block)
        self.num_evictions += 1
        return block
