"""Kept sequences: tokens and blocks of requests that have ended, under a handle that a client chose.

Two uses of one thing. A *session* continues, forks and rewinds what it kept; its blocks yield to requests that need
them, least recently used first, and then only the tokens remain. A *pinned prefix* (3.4.4, shared prefix) never yields,
and every prompt that begins with its tokens uses its blocks, the partly filled last one included.

Owns the kept block tables, which count as holders of their blocks. Called by the KV cache manager and by the core's
control operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from quire.engine_core.block_table import NO_BLOCK, BlockTable
from quire.engine_core.kv_cache_manager.block_moves import BlockMoves
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.engine_core.kv_cache_manager.prefix_cache import ComputedBlocks, PrefixCache
from quire.engine_core.request import Request, Sequence
from quire.engine_core.rows import Tokens
from quire.errors import UserError, suggestion


class KeptSequence:
    """Tokens [0, num_computed_tokens) lie in the blocks; the rest would be computed when it is continued."""

    def __init__(
        self,
        handle: str,
        tokens: Tokens,
        tables: list[BlockTable],
        num_computed_tokens: int,
        user_key: bytes,
        scope: bytes = b"",
    ) -> None:
        self.handle = handle
        self.tokens = tokens
        self.block_tables = tables
        self.num_computed_tokens = num_computed_tokens
        self.user_key = user_key
        # the tenant's whose it is; only what has none can be everybody's
        self.scope = scope
        self.is_pinned = False
        # a recurrent state may have absorbed one token more, which a step in flight computed
        self.is_ahead = False
        self.num_hits = 0
        self.num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return sum(len(table.held()) for table in self.block_tables)

    def report(self) -> dict[str, Any]:
        return {
            "handle": self.handle,
            "num_tokens": len(self.tokens),
            "num_computed_tokens": self.num_computed_tokens,
            "num_blocks": self.num_blocks,
            "is_pinned": self.is_pinned,
            "num_hits": self.num_hits,
            "num_hit_tokens": self.num_hit_tokens,
        }


class KeptSequences:
    """By handle. Whoever holds blocks and is not pinned offers them to all others."""

    def __init__(
        self, pool: BlockPool, moves: BlockMoves, groups: list[KVGroup], block_size: int, cache: PrefixCache
    ) -> None:
        self._pool = pool
        self._moves = moves
        self._groups = groups
        self._has_states = groups[-1].num_state_blocks > 0
        self._block_size = block_size
        self._cache = cache
        self.by_handle: dict[str, KeptSequence] = {}
        self.pinned: list[KeptSequence] = []
        self.pinned_blocks: frozenset[int] = frozenset()
        # those that offer their blocks, least recently used first
        self._offering: OrderedDict[str, KeptSequence] = OrderedDict()

    def __iter__(self) -> Iterator[KeptSequence]:
        return iter(self.by_handle.values())

    def find(self, handle: str) -> KeptSequence | None:
        return self.by_handle.get(handle)

    # ------------------------------------------------------------------------------------------ operations

    def keep(self, handle: str, sequence: Sequence, num_settled: int) -> None:
        """Holds what a living sequence has computed for sure; what a step in flight computes may yet fail. The handle's
        old content goes, unless it was pinned meanwhile."""
        old = self.by_handle.get(handle)
        if old is not None and old.is_pinned:
            return
        num_known = sequence.num_known_tokens
        num_computed = max(0, min(num_settled, num_known))
        if self._has_states and sequence.num_computed_tokens - num_computed > 1:
            # Steps in flight absorb tokens into its state. One that is kept as well is read again; more are too many.
            num_computed = 0
        kept = KeptSequence(
            handle,
            sequence.token_ids(0, num_known).copy(),
            self._first(sequence.block_tables, num_computed),
            num_computed,
            sequence.request.user_key,
            sequence.request.scope,
        )
        kept.is_ahead = self._has_states and sequence.may_have_absorbed_more(num_computed)
        self._hold(kept)
        if old is not None:
            self.release(handle)
        self.by_handle[handle] = kept
        self._offer(kept)

    def fork(self, handle: str, into: str) -> bool:
        source = self._get(handle)
        if into in self.by_handle:
            raise UserError(f"handle {into!r}: it is in use. Release it, or choose another one.")
        tables = [table.first(len(table)) for table in source.block_tables]
        copy = KeptSequence(into, source.tokens, tables, source.num_computed_tokens, source.user_key, source.scope)
        copy.is_ahead = source.is_ahead
        self._hold(copy)
        self.by_handle[into] = copy
        self._offer(copy)
        return True

    def rewind(self, handle: str, num_tokens: int) -> bool:
        """Forgets the tokens from num_tokens on. Its blocks are never written here, so nothing need be copied."""
        kept = self._get(handle)
        if not isinstance(num_tokens, int) or not 0 <= num_tokens <= len(kept.tokens):
            raise UserError(
                f"num_tokens={num_tokens!r}: must be between 0 and {len(kept.tokens)}, what {handle!r} holds."
            )
        if kept.is_pinned:
            raise UserError(f"handle {handle!r}: a pinned prefix cannot be rewound. Release it and pin another one.")
        self._withdraw(kept)
        self._rewind(kept, num_tokens)
        self._offer(kept)
        return True

    def release(self, handle: str) -> bool:
        kept = self._get(handle)
        self._drop_blocks(kept)
        if kept.is_pinned:
            self.pinned.remove(kept)
            self._count_pinned()
        del self.by_handle[handle]
        return True

    def pin(self, handle: str, num_tokens: int, most_blocks: int) -> dict[str, Any]:
        """The first num_tokens become a prefix that is never evicted and that prompts find by themselves."""
        kept = self._get(handle)
        if not self._pool.keeps_contents:
            raise UserError("pin_kept: needs enable_prefix_caching=True, by which prompts find the prefix.")
        if not isinstance(num_tokens, int) or not 0 < num_tokens <= kept.num_computed_tokens:
            raise UserError(
                f"num_tokens={num_tokens!r}: {handle!r} has {kept.num_computed_tokens} computed tokens; between 1 and "
                "so many can be pinned. (Blocks that are only kept may be evicted: compute them again.)"
            )
        tables = self._tables_at(kept, num_tokens)
        if tables is None or kept.is_ahead:
            why = (
                "a recurrent state stands elsewhere than behind"
                if self._has_states
                else "a sliding window has passed blocks of"
            )
            raise UserError(
                f"handle {handle!r}: {why} the first {num_tokens} tokens. Keep a request that ends there, "
                "with max_tokens=1."
            )
        num_blocks = sum(block != NO_BLOCK for table in tables for block in table)
        if not kept.is_pinned and num_blocks > most_blocks:
            raise UserError(
                f"handle {handle!r}: its {num_blocks} blocks cannot be pinned; {most_blocks} more may be, because the "
                "rest of the KV cache belongs to requests that were accepted. Pin less, or give the cache more memory."
            )
        self._withdraw(kept)
        self._rewind(kept, num_tokens)
        self._free_passed(kept)
        if not kept.is_pinned:
            kept.is_pinned = True
            self.pinned.append(kept)
            # the longest that fits is the best hit
            self.pinned.sort(key=lambda one: -len(one.tokens))
        self._count_pinned()
        self.name_pinned()
        return kept.report()

    def name_pinned(self) -> None:
        """Gives the full blocks of pinned prefixes their names, also after the cache was reset."""
        for kept in self.pinned:
            names = self._names_of(kept)
            # a state is found by the tokens before it (`extended`), not by names
            tables = kept.block_tables[:-1] if self._has_states else kept.block_tables
            for number, table in enumerate(tables):
                for block, content in zip(table.blocks.tolist(), names, strict=False):
                    if block != NO_BLOCK:
                        self._pool.claim(block, (number, content))

    def _names_of(self, kept: KeptSequence) -> list[bytes]:
        """Those under which a request of the same salt, adapter and tenant looks for its full blocks."""
        hasher = self._cache.hasher
        tokens = kept.tokens
        root = hasher.root(kept.user_key)
        if not kept.scope:
            return hasher.chain(root, tokens)
        public = self._num_public_blocks(kept.user_key, tokens) * self._block_size
        names = hasher.chain(root, tokens[:public])
        return names + hasher.chain(hasher.own(names[-1] if names else root, kept.scope), tokens[public:])

    # ------------------------------------------------------------------------------------------ for the manager

    def set_public_part(self, request: Request) -> None:
        """Of a tenant's prompt the full blocks that a pinned prefix has as well, and that are no secret. It is settled
        before the first of its blocks has a name. Asked where the request has a scope."""
        (sequence,) = request.sequences.values()
        if request.was_started or sequence.is_begun:
            return
        self._cache.forget_names(sequence)  # it was looked up with less of its prompt
        tokens = sequence.token_ids(0, sequence.num_known_tokens)
        request.num_public_blocks = self._num_public_blocks(request.user_key, tokens)

    def _num_public_blocks(self, user_key: bytes, tokens: Tokens) -> int:
        most = max((_num_common(one.tokens, tokens) for one in self.pinned if _is_open_to(one, user_key)), default=0)
        return most // self._block_size

    def continued(self, sequence: Sequence) -> ComputedBlocks | None:
        """What the handle that the request continues has at hand; None if it has lost its blocks or has changed."""
        handle = sequence.request.message.continues
        kept = self.by_handle.get(handle) if handle is not None else None
        request = sequence.request
        if kept is None or (kept.user_key, kept.scope) != (request.user_key, request.scope):
            return None
        num_tokens = min(kept.num_computed_tokens, sequence.num_known_tokens - 1)
        if num_tokens <= 0 or not np.array_equal(kept.tokens[:num_tokens], sequence.token_ids(0, num_tokens)):
            return None
        tables = self._tables_at(kept, num_tokens)
        return None if tables is None else ComputedBlocks(num_tokens, tables, kept)

    def extended(self, sequence: Sequence, hit: ComputedBlocks) -> ComputedBlocks:
        """A hit, with the rest of the pinned prefix that it reaches the end of. One of whole blocks does, or there is a
        state behind that prefix alone."""
        if not self.pinned or not sequence.looks_up:
            return hit
        for kept in self.pinned:
            length = len(kept.tokens)
            is_reached = self._has_states or length - length % self._block_size == hit.num_tokens
            is_longer = hit.num_tokens < length < sequence.num_known_tokens
            if is_reached and is_longer and self._begins(kept, sequence):
                tables = self._tables_at(kept, length)
                if tables is not None:
                    return ComputedBlocks(length, tables, kept, num_without_state=hit.num_without_state)
        return hit

    def count_hit(self, computed: ComputedBlocks) -> None:
        """Usage, as it is reported: also of prompts that share the pinned blocks and go on with others."""
        kept = computed.source
        if kept is None and self.pinned and computed.num_tokens:
            blocks = set(computed.blocks[0])
            kept = next((one for one in self.pinned if self._last_full_block(one) in blocks), None)
        if kept is None:
            return
        kept.num_hits += 1
        kept.num_hit_tokens += min(computed.num_tokens, len(kept.tokens))
        if kept.handle in self._offering:
            self._offering.move_to_end(kept.handle)

    def give_up_blocks(self, num_blocks: int) -> None:
        """The least recently used ones lose their blocks until so many can be handed out; not who would lose them for
        nothing, because others hold them all as well."""
        while self._pool.num_available < num_blocks:
            kept = next(filter(self._has_some_to_give, self._offering.values()), None)
            if kept is None:
                return
            self._drop_blocks(kept)

    def give_up_blocks_of(self, handle: str | None) -> bool:
        """For a request that has no room beside what it continues: the last block, if it is partly filled, which it
        would copy; else all. False if there are none."""
        kept = self._offering.get(handle) if handle is not None else None
        if kept is None:
            return False
        num_full = kept.num_computed_tokens - kept.num_computed_tokens % self._block_size
        self._withdraw(kept)
        self._shorten(kept, num_full if num_full < kept.num_computed_tokens else 0)
        self._offer(kept)
        return True

    # ------------------------------------------------------------------------------------------ inside

    def _first(self, tables: list[BlockTable], num_tokens: int) -> list[BlockTable]:
        pairs = zip(self._groups, tables, strict=True)
        return [table.first(group.num_blocks(num_tokens, self._block_size)) for group, table in pairs]

    def _get(self, handle: str) -> KeptSequence:
        kept = self.by_handle.get(handle)
        if kept is None:
            raise UserError(f"handle {handle!r}: nothing is kept under it.{suggestion(str(handle), self.by_handle)}")
        return kept

    def _count_pinned(self) -> None:
        """Once when they change: each arrival asks."""
        tables = (table for kept in self.pinned for table in kept.block_tables)
        self.pinned_blocks = frozenset(block for table in tables for block in table.held().tolist())

    def _hold(self, kept: KeptSequence) -> None:
        for table in kept.block_tables:
            self._pool.hold(table.held())

    def _offer(self, kept: KeptSequence) -> None:
        if kept.num_computed_tokens:
            self._offering[kept.handle] = kept
            for table in kept.block_tables:
                self._pool.offer(table.held())

    def _withdraw(self, kept: KeptSequence) -> None:
        if self._offering.pop(kept.handle, None) is not None:
            for table in kept.block_tables:
                self._pool.withdraw(table.held())

    def _has_some_to_give(self, kept: KeptSequence) -> bool:
        return any(len(self._pool.within_reach(table.held())) for table in kept.block_tables)

    def _drop_blocks(self, kept: KeptSequence) -> None:
        self._withdraw(kept)
        for table in kept.block_tables:
            self._moves.release(table.held()[::-1])
            table.clear()
        kept.num_computed_tokens = 0

    def _rewind(self, kept: KeptSequence, num_tokens: int) -> None:
        kept.tokens = kept.tokens[:num_tokens]
        if kept.num_computed_tokens > num_tokens:
            self._shorten(kept, num_tokens)

    def _shorten(self, kept: KeptSequence, num_tokens: int) -> None:
        """Only so many stay computed, or none if a window has passed what they need."""
        if self._tables_at(kept, num_tokens) is None:
            self._drop_blocks(kept)
            return
        kept.num_computed_tokens = num_tokens
        for group, table in zip(self._groups, kept.block_tables, strict=True):
            num_blocks = group.num_blocks(num_tokens, self._block_size)
            passed = table.blocks[num_blocks:]
            self._moves.release(passed[passed != NO_BLOCK][::-1])
            table.truncate(num_blocks)

    def _last_full_block(self, kept: KeptSequence) -> int | None:
        num_full = len(kept.tokens) // self._block_size
        has_tokens = not self._groups[0].num_state_blocks
        return kept.block_tables[0][num_full - 1] if num_full and has_tokens else None

    def _free_passed(self, kept: KeptSequence) -> None:
        """What its windows have passed it need not hold; it could only be rewound."""
        for group, table in zip(self._groups, kept.block_tables, strict=True):
            passed = table.blocks[: group.first_needed_block(kept.num_computed_tokens, self._block_size)]
            self._moves.release(passed[passed != NO_BLOCK][::-1])
            passed[:] = NO_BLOCK

    def _tables_at(self, kept: KeptSequence, num_tokens: int) -> list[list[int]] | None:
        """The block tables of its first num_tokens; None if a window has passed a block that is needed there, or a
        state stands elsewhere."""
        tables = []
        for group, table in zip(self._groups, kept.block_tables, strict=True):
            if group.num_state_blocks and num_tokens != kept.num_computed_tokens:
                return None
            num_blocks = group.num_blocks(num_tokens, self._block_size)
            first = min(group.first_needed_block(num_tokens, self._block_size), num_blocks)
            needed = table.blocks[first:num_blocks].tolist()
            if NO_BLOCK in needed or len(needed) < num_blocks - first:
                return None
            tables.append([NO_BLOCK] * first + needed)
        return tables

    def _begins(self, kept: KeptSequence, sequence: Sequence) -> bool:
        """Whether the sequence begins with these tokens, under the same salt and adapter, and with nothing else in
        their places."""
        request = sequence.request
        is_own = kept.user_key == request.user_key and kept.scope == request.scope
        if not (is_own or _is_open_to(kept, request.user_key)):
            return False
        media = sequence.request.message.media
        if media and media[0].start < len(kept.tokens):
            return False
        return np.array_equal(kept.tokens, sequence.token_ids(0, len(kept.tokens)))


def _is_open_to(kept: KeptSequence, user_key: bytes) -> bool:
    """Of the same salt and adapter, and not a tenant's."""
    return kept.user_key == user_key and not kept.scope


def _num_common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
