"""The prefix cache: which full blocks are known by content, and the longest prefix that every group can serve.

Names are chain hashes (quire/chain_hashes.py), keyed per engine. A block is named when its tokens are granted, not when
they are computed: all layers write before they read, so a sequence that is granted later in the same step may read it.
Until the step can preempt nobody any more such a name is a *promise*, and only the request that made it may rely on it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import KeysView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.chain_hashes import ChainHasher
from quire.engine_core.block_table import NO_BLOCK, Blocks
from quire.engine_core.kv_cache_manager.answer_ends import AnswerEnd, AnswerEnds
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import GroupsByLength, KVGroup
from quire.engine_core.request import Request, Sequence
from quire.messages import TEXT, int_array

if TYPE_CHECKING:
    from quire.engine_core.kv_cache_manager.kept import KeptSequence


@dataclass
class ComputedBlocks:
    """A prefix whose blocks are at hand: by group, one entry a block (-1 where a window has passed).

    The last block is partly filled if num_tokens says so; then it belongs to `source` and is copied before a write.
    """

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    # the kept sequence that served it, if it was one
    source: KeptSequence | None = None
    # the name under which its state was found
    state_name: bytes = b""
    # so many tokens are there, but no state behind them: others have begun like this, and will again
    num_without_state: int = 0

    def held_blocks(self, first: int = 0) -> Blocks:
        """Those that are there, of each group from its `first` one on."""
        return int_array([block for table in self.blocks for block in table[first:] if block != NO_BLOCK])


@dataclass(slots=True)
class KnownHit:
    """What a sequence has found. Until a name is lost it can only become longer, and does so where its next block gets
    a name: who waits is asked for it in each step, and looked up once."""

    num_names_lost: int
    # blocks that could be found, and those that were there
    limit: int
    length: int
    found: ComputedBlocks


class PrefixHasher(ChainHasher):
    """Computes and remembers the chain hashes of a sequence's full blocks."""

    def hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Hashes of the first num_blocks full blocks; earlier results are kept on the sequence. Not to be changed."""
        known = sequence.block_hashes
        num_public = sequence.request.num_public_blocks
        # what all may find and what is a tenant's own are two pieces of one chain
        for end in (min(num_public, num_blocks), num_blocks):
            if len(known) < end:
                first = len(known)
                tokens = sequence.token_ids(first * self.block_size, end * self.block_size)
                contents = None
                if sequence.request.message.media:
                    contents = [self.media_content(sequence.request, index) for index in range(first, end)]
                known += self.chain(self.parent(sequence), tokens, contents)
        return known if len(known) == num_blocks else known[:num_blocks]

    def add_next(self, sequence: Sequence, index: int, content: bytes) -> bytes:
        """The hash of block `index`, the first one that has none, from its tokens."""
        if sequence.request.message.media:
            content += self.media_content(sequence.request, index)
        name = self.digest(self.parent(sequence) + content)
        sequence.block_hashes.append(name)
        return name

    def parent(self, sequence: Sequence) -> bytes:
        """What the next hash of this sequence is chained to."""
        known = sequence.block_hashes
        request = sequence.request
        parent = known[-1] if known else self.root(request.content_key)
        return self.own(parent, request.scope) if request.scope and len(known) == request.num_public_blocks else parent

    def media_content(self, request: Request, index: int) -> bytes:
        return self.of_images(request.message.media, index)

    def other_content(self, request: Request, index: int) -> bytes:
        """What a block that is no part of a chain holds besides its tokens, and whose it is."""
        return self.media_content(request, index) + request.scope


class PrefixCache:
    """Looks prefixes up and names blocks. References are taken by the manager, never here."""

    def __init__(self, pool: BlockPool, groups: list[KVGroup], hasher: PrefixHasher) -> None:
        self.hasher = hasher
        self._pool = pool
        self._groups = groups
        self._groups_of = GroupsByLength(groups).of
        self._block_size = hasher.block_size
        # a state has a name of its own, for all tokens before it, and its blocks no place in a chain
        self.num_state_blocks = groups[-1].num_state_blocks
        self.state_group = len(groups) - 1
        self._attention = groups[:-1] if self.num_state_blocks else groups
        self._is_whole = [not (group.sliding_window or group.part == TEXT) for group in self._attention]
        # a hit is the beginning of one chain, and can be remembered
        self._is_simple = self._is_whole == [True] and not self.num_state_blocks
        self._nothing = ComputedBlocks(0, [[] for _ in groups])
        # block -> request that was granted its tokens in the step that is being decided
        self._promises: dict[int, int] = {}
        # blocks that were named in each step whose results are not there, earliest first, and in the one being decided
        self._fresh: deque[dict[int, None]] = deque([{}])
        # of models with states
        self.ends = AnswerEnds()

    def longest_hit(self, sequence: Sequence) -> ComputedBlocks:
        """The longest prefix that every group can serve: whole blocks, or all that ends where an answer did."""
        if sequence.is_unnamed or not sequence.looks_up:
            return self._nothing
        # At least one token is always computed: its hidden state is what the next token is sampled from.
        limit = (sequence.num_known_tokens - 1) // self._block_size
        # Siblings would hold a checkpoint while all of them copy it, and that is more than they were admitted with.
        is_crowd = self.num_state_blocks and len(sequence.request.sequences) > 1
        if limit < (0 if self.ends.by_name else 1) or is_crowd:
            return self._nothing
        if self._is_simple and not self._promises:
            return self._longest_of_chain(sequence, limit)
        hashes = self.hasher.hashes(sequence, limit)
        length, reached = self._longest(hashes, sequence.request)
        num_without_state = reached * self._block_size
        found = self._longest_end(sequence, hashes, length) if self.ends.by_name else None
        if not length and found is None:
            return ComputedBlocks(0, [[] for _ in self._groups], num_without_state=num_without_state)
        if found is not None:
            end, blocks = found
            return ComputedBlocks(
                end.num_tokens, blocks, state_name=end.name, num_without_state=max(end.num_tokens, num_without_state)
            )
        num_tokens = length * self._block_size
        blocks = [self._blocks_of(number, hashes, length, sequence.request) for number in range(len(self._attention))]
        state_name = hashes[length - 1] if self.num_state_blocks else b""
        if self.num_state_blocks:
            blocks.append(self.state_after(state_name) or [])
        return ComputedBlocks(num_tokens, blocks, state_name=state_name, num_without_state=num_without_state)

    def forget_names(self, sequence: Sequence) -> None:
        """Its blocks are to have other names: it is looked up anew."""
        sequence.block_hashes.clear()
        sequence.last_hit = None

    def first_miss(self, sequence: Sequence, num_tokens: int) -> str:
        """Why no more than `num_tokens` of its tokens were at hand: a word of SequenceStart, "" if no more can be."""
        limit = (sequence.num_known_tokens - 1) // self._block_size
        index = num_tokens // self._block_size
        if index >= limit:
            return ""
        if not self._pool.keeps_contents:
            return "off"
        if not sequence.looks_up:
            return "every_position"
        name = self.hasher.hashes(sequence, limit)[index]
        keys = [(number, name) for number in range(len(self._attention))]
        reasons = [self._pool.lost.reason(key) or "new" for key in keys if self._pool.find(key) is None]
        if reasons:
            # in some groups of layers it may still be there
            return min(reasons)
        return "whole_range" if sequence.request.uncut_blocks(index + 1, self._block_size) <= index else "no_state"

    def _longest_of_chain(self, sequence: Sequence, limit: int) -> ComputedBlocks:
        known = sequence.last_hit
        if isinstance(known, KnownHit) and known.limit == limit:
            is_longer = known.length < limit and self._pool.find((0, sequence.block_hashes[known.length])) is not None
            if not is_longer and (not known.length or known.num_names_lost == self._pool.num_names_lost):
                return known.found
        hashes = self.hasher.hashes(sequence, limit)
        length = self._pool.length_of_chain(0, hashes)
        found = self._nothing
        if whole := sequence.request.uncut_blocks(length, self._block_size):
            num_tokens = whole * self._block_size
            blocks = self._blocks_of(0, hashes, whole, sequence.request)
            found = ComputedBlocks(num_tokens, [blocks], num_without_state=num_tokens)
        sequence.last_hit = KnownHit(self._pool.num_names_lost, limit, length, found)
        return found

    def _longest_end(
        self, sequence: Sequence, hashes: list[bytes], length: int
    ) -> tuple[AnswerEnd, list[list[int]]] | None:
        """The longest prefix that ends where an answer did and is longer than `length` blocks, with its blocks."""
        best = None
        for index in range(len(hashes), length - 1, -1):
            parent = hashes[index - 1] if index else self.hasher.root(sequence.request.content_key)
            for end in self.ends.behind(parent):
                is_longer = end.num_tokens > (best[0].num_tokens if best else length * self._block_size)
                start = index * self._block_size
                if is_longer and end.begins(sequence, start, self.hasher.other_content(sequence.request, index)):
                    blocks = self._blocks_at(end, hashes[:index], sequence.request)
                    best = best if blocks is None else (end, blocks)
            if best is not None:
                break
        return best

    def _blocks_at(self, end: AnswerEnd, hashes: list[bytes], request: Request) -> list[list[int]] | None:
        """The block tables of an end, or None if something of it was evicted or is not surely written."""
        state = self.state_after(end.name)
        if state is None:
            return None
        tables = []
        for number in range(len(self._attention)):
            first = self._first_block(number, end.num_tokens, request)
            blocks = [self.find(number, content, request.request_id) for content in hashes[first:]]
            if end.num_tokens % self._block_size:
                blocks.append(self.find_computed(number, end.name))
            found = [block for block in blocks if block is not None]
            if len(found) < len(blocks):
                return None
            tables.append([NO_BLOCK] * first + found)
        return [*tables, state]

    def find(self, group: int, content: bytes, request_id: int) -> int | None:
        """The block with that content, unless it is another request's promise."""
        block = self._pool.find((group, content))
        if block is not None and self._promises and self._promises.get(block, request_id) != request_id:
            return None
        return block

    def find_computed(self, group: int, content: bytes) -> int | None:
        """The block with that content, if it is surely there: a step that is to write it may fail for that row. Who
        reads it in that step or the next fails as well, but who only holds it would read it later, and not notice."""
        block = self._pool.find((group, content))
        return None if any(block in named for named in self._fresh) else block

    # ---- states: block i of one is found under the number of its group + i, and only with all the others

    def state_after(self, content: bytes) -> list[int] | None:
        """The blocks of a checkpoint behind these tokens, if there is one, surely written. Without states: none are
        needed."""
        blocks = [self.find_computed(self.state_group + i, content) for i in range(self.num_state_blocks)]
        found = [block for block in blocks if block is not None]
        return found if len(found) == self.num_state_blocks else None

    def name_state(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The blocks of its state, which stands behind so many tokens, get their names. Copies are made before anything
        is computed, so nobody finds them before what has written them is known to have done so."""
        name = self.hasher.hashes(sequence, num_tokens // self._block_size)[-1]
        for i, block in enumerate(sequence.block_tables[self.state_group]):
            if self._pool.register(block, (self.state_group + i, name), sequence.request.owner):
                self._fresh[-1][block] = None
        return name

    def name_end(self, sequence: Sequence, num_tokens: int, *, is_ahead: bool) -> bytes | None:
        """The same where its answer ends, in the blocks that it has; `is_ahead`: a step in flight may have absorbed one
        token more. None: others hold some of them, or they have names."""
        index, num_filled = divmod(num_tokens, self._block_size)
        entries = [(number, table[index]) for number, table in enumerate(sequence.block_tables[:-1]) if num_filled]
        entries += [(self.state_group + i, block) for i, block in enumerate(sequence.block_tables[self.state_group])]
        if any(self._pool.count(block) > 1 or self._pool.key_of(block) is not None for _, block in entries):
            return None
        end = self._end_of(sequence, index, num_tokens, num_tokens + is_ahead)
        if self.names_state(end.name):
            return end.name
        self.forget_state(end.name)  # what is left of a twin: its state may stand one token further
        for number, block in entries:
            self._pool.register(block, (number, end.name), sequence.request.owner)
        if is_ahead and self.num_steps_awaited:
            self._fresh[-2].update(dict.fromkeys(block for _, block in entries))
        self.ends.add(end)
        return end.name

    def _end_of(self, sequence: Sequence, index: int, num_tokens: int, num_certain: int) -> AnswerEnd:
        hashes = self.hasher.hashes(sequence, index)
        parent = hashes[-1] if hashes else self.hasher.root(sequence.request.content_key)
        tokens = sequence.token_ids(index * self._block_size, num_certain).tobytes()
        others = self.hasher.other_content(sequence.request, index)
        kind = struct.pack("<qq", num_tokens, num_certain)
        return AnswerEnd(self.hasher.digest(parent + kind + tokens + others), parent, num_tokens, tokens, others)

    def names_state(self, name: bytes) -> bool:
        return all(self._pool.find(key) is not None for key in self._keys_of_state(name))

    def forget_state(self, name: bytes) -> None:
        for key in self._keys_of_state(name):
            block = self._pool.find(key)
            if block is not None:
                self._pool.discard(block)
        end = self.ends.get(name)
        if end is not None:
            self.ends.remove(end)

    def _keys_of_state(self, name: bytes) -> list[tuple[int, bytes]]:
        """Of its blocks, and of those that an answer's end fills a part of."""
        end = self.ends.get(name)
        has_parts = end is not None and end.num_tokens % self._block_size > 0
        parts = [(number, name) for number in range(len(self._attention)) if has_parts]
        return parts + [(self.state_group + i, name) for i in range(self.num_state_blocks)]

    def name_blocks(self, sequence: Sequence, num_computed: int, *, is_promise: bool) -> None:
        """Names the full blocks below num_computed that have no name yet."""
        num_full = num_computed // self._block_size
        owner = sequence.request.owner
        hashes = self.hasher.hashes(sequence, num_full)
        changes = self._pool.changes
        for index in range(sequence.num_named_blocks, num_full):
            for number, _ in enumerate(self._attention):
                block = sequence.block_tables[number][index]
                if block == NO_BLOCK or not self._pool.register(block, (number, hashes[index]), owner):
                    continue
                self._fresh[-1][block] = None
                if changes is not None:
                    changes.stored(number, sequence, index, hashes)
                if is_promise:
                    self._promises[block] = sequence.request.request_id

    def name_next(self, sequences: list[Sequence], indices: list[int], content: bytes) -> None:
        """Names one block of each, whose tokens stand in `content` one block after the other."""
        hasher = self.hasher
        size = self._block_size * 4
        fresh = self._fresh[-1]
        changes = self._pool.changes
        for start, sequence, index in zip(range(0, len(content), size), sequences, indices, strict=True):
            name = hasher.add_next(sequence, index, content[start : start + size])
            block = sequence.block_tables[0][index]
            if self._pool.register(block, (0, name), sequence.request.owner):
                fresh[block] = None
                if changes is not None:
                    changes.stored(0, sequence, index, sequence.block_hashes)

    def has_promises(self, request: Request) -> bool:
        return request.request_id in self._promises.values()

    def break_promises(self, request: Request) -> None:
        """Its tokens will not be computed in this step after all."""
        for block in [block for block, owner in self._promises.items() if owner == request.request_id]:
            self._pool.forget(block)
            del self._promises[block]

    def step_decided(self) -> None:
        self._fresh.append({})

    @property
    def fresh_blocks(self) -> KeysView[int]:
        """Those that have got a name since the last step was decided, in this order; some have lost it again."""
        return self._fresh[-1].keys()

    def step_settled(self) -> None:
        """The results of the earliest step are there: what failed in it is forgotten."""
        self._fresh.popleft()

    @property
    def num_steps_awaited(self) -> int:
        """Whose results are not there."""
        return len(self._fresh) - 1

    def settle(self) -> None:
        """Nobody can be preempted in this step any more: promises will be kept."""
        self._promises.clear()

    def _longest(self, hashes: list[bytes], request: Request) -> tuple[int, int]:
        """Blocks of the longest prefix that all groups can serve, and of the one that those with tokens can: one pass
        over the hashes, for any mix of windows. None that ends where the request may not be cut."""
        request_id = request.request_id
        run_lengths = [0] * len(self._attention)
        longest = reached = 0
        for index, content in enumerate(hashes):
            for number in range(len(self._attention)):
                is_there = self.find(number, content, request_id) is not None
                if self._is_whole[number] and not is_there:
                    return longest, reached
                run_lengths[number] = run_lengths[number] + 1 if is_there else 0
            length = index + 1
            if request.uncut_blocks(length, self._block_size) < length:
                continue
            if all(
                run >= length - self._first_block(n, length * self._block_size, request)
                for n, run in enumerate(run_lengths)
            ):
                reached = length if self._attention else 0
                longest = length if self.state_after(content) is not None else longest
        return longest, reached

    def _blocks_of(self, number: int, hashes: list[bytes], length: int, request: Request) -> list[int]:
        first = self._first_block(number, length * self._block_size, request)
        found = [self._pool.find((number, content)) for content in hashes[first:length]]
        return [NO_BLOCK] * first + [block for block in found if block is not None]

    def _first_block(self, number: int, num_tokens: int, request: Request) -> int:
        """The first full block of a prefix that this group still needs."""
        needed = self._groups_of(request)[number].first_needed_block(num_tokens, self._block_size)
        return min(needed, num_tokens // self._block_size)


def common_length(one: list[bytes], other: list[bytes]) -> int:
    """How far two chains agree: where two hashes are equal, so are all before them."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])
