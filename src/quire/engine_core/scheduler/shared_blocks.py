"""Blocks of the prefix cache that go on living elsewhere, under names that say what they hold.

Below the prefix cache: a block that gets its name is kept elsewhere as well. Not when it is given up: a process that is
killed would have kept nothing, another engine could read it only then, and who needs the block would wait for the copy.
A request that arrives has the blocks brought near that are not here, and waits for them as long as that is worth it;
when it begins, what is near is loaded behind what the prefix cache has, and the rest is computed.

What a request says of a transfer besides: with `store` the last, partly filled block of its prompt is kept, too, and
with `fetch` it is looked for, and waited for although it may not be there yet. The keys themselves say nothing here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Values
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from quire.engine_core.block_table import NO_BLOCK
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.scheduler.transfers import Fetch, Transfers
from quire.kv_connectors.connector import (
    STEP_DATA,
    BlockSpill,
    NamedBlocks,
    NoSchedulerHalf,
    SchedulerHalf,
    StepTransfers,
)
from quire.messages import KVTransfer

# of those that have asked, in each step
_NUM_LOOKED_AT = 4


@dataclass(frozen=True)
class _Near:
    """A prefix of which these blocks are near; the first of them is behind what is here."""

    num_tokens: int
    # what the connector knows them by
    blocks: Values[Any]


@dataclass(frozen=True)
class _Wanted:
    """What could come of a prefix: so many tokens, and the names of the blocks that they lie in, of each block those of
    all groups. `is_whole`: less than all is of no use."""

    num_tokens: int
    names: list[bytes]
    is_whole: bool = False


_NOTHING = _Wanted(0, [])
_T = TypeVar("_T")


class SharedBlocks(Transfers):
    """As `Transfers`, for a connector that knows single blocks."""

    def __init__(self, connector: NamedBlocks, manager: KVCacheManager, seconds_per_token: float) -> None:
        super().__init__(NoSchedulerHalf(), manager.block_size)
        self._blocks = connector
        self._manager = manager
        self._cache = manager.cache
        self._hasher = manager.cache.hasher
        self._pool = manager.pool
        self._num_state_blocks = manager.num_state_blocks
        self._attention = manager.groups[:-1] if self._num_state_blocks else manager.groups
        self._num_groups = len(self._attention)
        # those that wait; those that hold near what they wait for, or waited; and those that may have begun
        self._waiting: dict[int, Request] = {}
        self._asked: OrderedDict[int, Request] = OrderedDict()
        self._beginning: list[Request] = []
        connector.set_price(manager.block_size * seconds_per_token)

    def concerns(self, request: Request) -> bool:
        # prompts in pieces, too: what was computed by others before is found, though nothing is brought for them
        return request.use_prefix_cache

    def _reason_of_connector(self, transfer: KVTransfer) -> str | None:
        return None

    # ------------------------------------------------------------------------------------------ waiting

    def ask(self, request: Request) -> bool:
        (sequence,) = request.sequences.values()
        if not request.is_final or not sequence.looks_up:
            return False
        wanted = self._wanted(sequence, self._manager.get_computed_blocks(sequence).num_tokens)
        if not wanted.num_tokens:
            return False
        self._asked[request.request_id] = request
        is_expected = request.message.transfer is not None and request.message.transfer.fetch is not None
        if not self._blocks.ask(request.request_id, wanted.names, is_expected=is_expected):
            return False
        self._waiting[request.request_id] = request
        return True

    def arrived(self) -> list[tuple[Request, str | None]]:
        """What comes is there, or does not come in time: then it is computed."""
        if not self._asked:
            return []
        numbers = self._blocks.arrived()
        arrived = [self._waiting.pop(number) for number in numbers if number in self._waiting]
        # Who has begun has loaded it. Of who has ended nobody tells: some are looked at in each step.
        looked_at = [*self._beginning, *islice(self._asked.values(), _NUM_LOOKED_AT)]
        self._beginning = []
        for request in looked_at:
            self._look_at(request)
        return [(request, None) for request in arrived]

    def _look_at(self, request: Request) -> None:
        number = request.request_id
        if number not in self._asked:
            return
        if request.status is Status.WAITING:
            self._asked.move_to_end(number)
            return
        self._blocks.forget(number)
        del self._asked[number]
        self._waiting.pop(number, None)

    def begin(self, sequence: Sequence, num_computed: int) -> int:
        if sequence.request.request_id in self._asked:
            self._beginning.append(sequence.request)
        return super().begin(sequence, num_computed)

    def wait(self) -> bool:
        if self._waiting:
            self._blocks.wait()
        return bool(self._waiting)

    # ------------------------------------------------------------------------------------------ what can be had

    def _look_up(self, sequence: Sequence, num_computed: int) -> tuple[_Near | None, int]:
        if not sequence.looks_up:
            return None, 0
        wanted = self._wanted(sequence, num_computed)
        if not wanted.num_tokens:
            return None, 0
        near = self._blocks.near(wanted.names)
        if wanted.is_whole:
            if len(near) < len(wanted.names):
                return None, 0
            return _Near(num_computed + wanted.num_tokens, near), wanted.num_tokens
        whole = len(near) // self._num_groups
        if not whole:
            return None, 0
        num_tokens = min(wanted.num_tokens, whole * self.block_size)
        first = num_computed // self.block_size
        uncut = sequence.request.uncut_blocks(first + whole, self.block_size)
        if uncut < first + whole:
            whole = uncut - first
            num_tokens = whole * self.block_size
        if num_tokens <= 0:
            return None, 0
        end = num_computed + num_tokens
        return _Near(end, self._only_needed(near[: whole * self._num_groups], first, end)), num_tokens

    def _only_needed(self, of_all_groups: Values[_T], first: int, end: int) -> Values[_T]:
        """Of what stands for all blocks from the first one on, of each block for all groups: that which a prefix of
        `end` tokens needs. Windows have passed the others."""
        if not self._manager.has_windows:
            return of_all_groups
        size = self.block_size
        starts = [min(group.first_needed_block(end, size), end // size) for group in self._attention]
        place = ((first + i // self._num_groups, i % self._num_groups) for i in range(len(of_all_groups)))
        return [one for one, (index, group) in zip(of_all_groups, place, strict=True) if index >= starts[group]]

    def _wanted(self, sequence: Sequence, num_computed: int) -> _Wanted:
        """What could come behind the first num_computed tokens. As with any prefix at least one token is computed."""
        size = self.block_size
        end = sequence.num_known_tokens - 1
        transfer = sequence.request.message.transfer
        is_fetched = transfer is not None and transfer.fetch is not None
        if transfer is not None and is_fetched:
            end = min(end, transfer.num_fetch_tokens)
        # a state is kept behind a prompt, and goes where the output goes on
        has_state = not self._num_state_blocks or (is_fetched and end == sequence.request.num_prompt_tokens)
        if num_computed % size or end <= num_computed or not has_state:
            return _NOTHING
        first = num_computed // size
        contents = self._hasher.hashes(sequence, end // size)[first:]
        num_tokens = len(contents) * size
        # a block that is partly filled was written under the name of its prompt's end alone
        if transfer is not None and is_fetched and end % size and end == transfer.num_fetch_tokens:
            contents = [*contents, self._name_of_end(sequence, end)]
            num_tokens = end - num_computed
        names: Values[bytes] = [
            self._blocks.name_of(group, one) for one in contents for group in range(self._num_groups)
        ]
        is_whole = is_fetched and self._manager.may_miss_siblings
        if is_whole:
            # where it ends is known, so that nothing need come that nobody would read
            names = self._only_needed(names, first, num_computed + num_tokens)
        if self._num_state_blocks:
            names = [*names, *self._names_of_state(self._name_of_end(sequence, end))]
        return _Wanted(num_tokens, list(names), is_whole)

    def _names_of_state(self, content: bytes) -> list[bytes]:
        """Of its blocks, behind a prompt whose end has this name."""
        parts = (
            self._hasher.digest(b"state" + content + number.to_bytes(8, "little"))
            for number in range(self._num_state_blocks)
        )
        return [self._blocks.name_of(self._num_groups, part) for part in parts]

    def _name_of_end(self, sequence: Sequence, end: int) -> bytes:
        """Of a block that is partly filled."""
        index = end // self.block_size
        self._hasher.hashes(sequence, index)
        tokens = sequence.token_ids(index * self.block_size, end).tobytes()
        others = self._hasher.other_content(sequence.request, index)
        known = sequence.block_hashes[:index]
        parent = known[-1] if known else self._hasher.root(sequence.request.content_key)
        return self._hasher.digest(b"end" + parent + len(tokens).to_bytes(8, "little") + tokens + others)

    # ------------------------------------------------------------------------------------------ what a step moves

    def step_data(self) -> dict[str, Any]:
        fresh = self._cache.fresh_blocks
        if not fresh and not self.fetches and not self.to_store:
            return {}
        loads = self._take_loads()
        spills = [spill for block in fresh if (spill := self._spill_of(block)) is not None]
        for sequence in self._take_computed():
            spills += self._ends_of(sequence)
        self.num_stored_blocks += len(spills)
        return {STEP_DATA: StepTransfers(loads=loads, spills=spills)} if loads or spills else {}

    def _spill_of(self, block: int) -> BlockSpill | None:
        # none any more if it was given to somebody else, or its request has failed
        key = self._pool.key_of(block)
        if key is None or key[0] >= self._num_groups:
            return None
        name = self._blocks.name_of(*key)
        return BlockSpill(name=name, block=block) if self._blocks.wants(name) else None

    def _ends_of(self, sequence: Sequence) -> list[BlockSpill]:
        """The last block of its prompt, if it is partly filled, and the state behind it."""
        length = sequence.request.num_prompt_tokens
        index = length // self.block_size
        content = self._name_of_end(sequence, length)
        tables = sequence.block_tables[: self._num_groups] if length % self.block_size else []
        ends = [
            BlockSpill(name=self._blocks.name_of(group, content), block=table[index])
            for group, table in enumerate(tables)
        ]
        if self._num_state_blocks:
            state = zip(self._names_of_state(content), sequence.block_tables[-1], strict=True)
            ends += [BlockSpill(name=name, block=block) for name, block in state]
        return ends

    def _blocks_to_load(self, fetch: Fetch) -> list[list[int]]:
        """In the order of their names."""
        tables = fetch.sequence.block_tables
        blocks = [table[index] for index in range(fetch.first, fetch.last) for table in tables[: self._num_groups]]
        state = list(tables[-1]) if self._num_state_blocks else []
        return [[block for block in blocks if block != NO_BLOCK] + state]

    def _source_of(self, fetch: Fetch) -> tuple[int, Any]:
        assert isinstance(fetch.found, _Near)
        return 0, self._blocks.lend(fetch.found.blocks)

    def _statistics_of_connector(self) -> dict[str, float]:
        return self._blocks.statistics()


def transfers_with(
    connector: SchedulerHalf | NamedBlocks | None, manager: KVCacheManager, seconds_per_token: float
) -> Transfers:
    """Those of a connector of either kind."""
    if isinstance(connector, NamedBlocks):
        return SharedBlocks(connector, manager, seconds_per_token)
    return Transfers(connector or NoSchedulerHalf(), manager.block_size)
