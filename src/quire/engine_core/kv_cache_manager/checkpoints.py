"""Checkpoints of recurrent states: which ones are kept, and that they do not take the pool.

A state is overwritten with every token, so of a prefix that others may continue a copy must be left behind. It is the
blocks themselves: a sequence that stands at a boundary that is wanted names its blocks, goes on in copies of them, and
lets go of the old ones, which are found and evicted like any cached block. Nobody gives way for a checkpoint.

    prompt        |--------|--------|-----        every `interval` tokens, at the last boundary, and where tokens of
                                                  others were found, but no state behind them
    output                            ---|--|     the last multiple of `interval`, the one before goes; and its end

At the end of an output nothing is copied: its sequence lets go of its blocks, and the next turn of a chat finds them.

Called by the KV cache manager.
"""

from __future__ import annotations

from collections import OrderedDict

from quire.engine_core.block_table import BlockTable
from quire.engine_core.kv_cache_manager.block_pool import BlockPool
from quire.engine_core.kv_cache_manager.prefix_cache import ComputedBlocks, PrefixCache
from quire.engine_core.request import Sequence
from quire.engine_core.rows import Rows

# (group, index in the block table)
Entry = tuple[int, int]


class StateCheckpoints:
    """Of a model with states: at most `share` of the pool; of those, the ones that were found or made last.

    Asked when blocks are about to be written: `worth_a_copy`, then `leave` or, without room for copies, `take_over`.
    """

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, rows: Rows, interval: int, share: float, least: int
    ) -> None:
        """Fewer than `least` tokens are computed again sooner than a state is copied."""
        self._pool = pool
        self._cache = cache
        self._ends = cache.ends
        self._rows = rows
        self._block_size = cache.hasher.block_size
        # tokens between two that are wanted
        self.interval = -(-max(interval, least) // self._block_size) * self._block_size
        self._least = least
        self._most = int(share * pool.num_blocks) // max(1, cache.num_state_blocks)
        # by name, oldest first; some may have been evicted since
        self._names: OrderedDict[bytes, None] = OrderedDict()
        self.num_made = 0
        self.num_hit_tokens = 0

    def worth_a_copy(
        self, sequence: Sequence, start: int, table: list[int] | BlockTable, num_holders: int
    ) -> list[Entry]:
        """Blocks of the state that nobody else needs (`num_holders` are all they have), and that would be found again
        if the sequence went on in copies of them."""
        is_found = num_holders == 0  # it is one already, which the sequence is about to begin from
        if not len(table) or not (is_found or self._is_wanted(sequence, start)):
            return []
        entries = enumerate(table)
        return [(self._cache.state_group, index) for index, block in entries if self._pool.count(block) == num_holders]

    def _is_wanted(self, sequence: Sequence, position: int) -> bool:
        """The state must be exactly the one of so many known tokens, and a prompt that begins so must look there."""
        is_boundary = position >= max(1, self._least) and position % self._block_size == 0
        if not (is_boundary and self._most and self._pool.keeps_contents):
            return False
        if position > sequence.num_known_tokens or self._rows.doubtful_at[sequence.row] == position:
            return False
        last_of_prompt = (sequence.request.num_prompt_tokens - 1) // self._block_size * self._block_size
        is_branch = self._rows.branches_at[sequence.row] == position
        return position % self.interval == 0 or position == last_of_prompt or bool(is_branch)

    def leave(self, sequence: Sequence, start: int, name: bytes) -> None:
        """They stay behind as a checkpoint of so many tokens; `name`: under which they are one already."""
        name = name or self._cache.name_state(sequence, start)
        if self._remember(name) and start > sequence.request.num_prompt_tokens:
            self._drop(sequence.last_checkpoint)
            sequence.last_checkpoint = name
        self._keep_share()

    def leave_end(self, sequence: Sequence, num_settled: int) -> None:
        """Its output ends, and so many of its tokens are surely computed: its blocks are about to be let go of."""
        is_answer = sequence.index == 0 and sequence.num_known_tokens > sequence.request.num_prompt_tokens
        is_worth_it = num_settled >= max(1, self._least)
        if not (is_answer and is_worth_it and self._most and self._pool.keeps_contents):
            return
        # drafts in flight may bring several
        if sequence.num_computed_tokens - num_settled > 1 or num_settled >= sequence.num_known_tokens:
            return
        name = self._cache.name_end(sequence, num_settled, is_ahead=sequence.may_have_absorbed_more(num_settled))
        if name is not None:
            self._remember(name)
            self._keep_share()

    def _remember(self, name: bytes) -> bool:
        """As the one that was found or made last. Whether it is new."""
        is_new = name not in self._names
        self._names[name] = None
        self._names.move_to_end(name)
        self.num_made += is_new
        return is_new

    def take_over(self, sequence: Sequence, entries: list[Entry]) -> None:
        """There is no room for copies: they are written, and found no more."""
        for group, index in entries:
            self._pool.forget(sequence.block_tables[group][index])

    def _keep_share(self) -> None:
        if len(self._names) <= self._most:
            return
        for name in [name for name in self._names if not self._cache.names_state(name)]:
            self._drop(name)  # evicted, at least a part of it
        while len(self._names) > self._most:
            self._drop(next(iter(self._names)))

    def _drop(self, name: bytes) -> None:
        if self._names.pop(name, b"") is None:
            self._cache.forget_state(name)

    def give_up_end(self, name: bytes) -> bool:
        """The end of an answer is not to be found any more. False: it is none."""
        is_end = self._ends.get(name) is not None
        if is_end:
            self._names.pop(name, None)
            self._cache.forget_state(name)
        return is_end

    def count_hit(self, computed: ComputedBlocks) -> None:
        """A new sequence begins behind these."""
        self.num_hit_tokens += computed.num_tokens if computed.source is None else 0

    def check_invariants(self) -> None:
        assert len(self._names) <= self._most, "checkpoints take more of the pool than their share"
        assert len(self._ends.by_name) <= len(self._names), "ends of answers are remembered that nobody counts"

    def statistics(self) -> dict[str, float]:
        num_there = sum(map(self._cache.names_state, self._names))
        return {
            "num_state_checkpoints": num_there,
            "num_state_checkpoint_blocks": num_there * self._cache.num_state_blocks,
            "num_state_checkpoints_made_total": self.num_made,
            "num_state_checkpoint_hit_tokens_total": self.num_hit_tokens,
        }
