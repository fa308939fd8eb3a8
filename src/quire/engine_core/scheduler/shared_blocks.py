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
from typing import Any

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.kv_cache_manager.prefix_cache import looks_up
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


class SharedBlocks(Transfers):
    """As `Transfers`, for a connector that knows single blocks."""

    def __init__(self, connector: NamedBlocks, manager: KVCacheManager, seconds_per_token: float) -> None:
        super().__init__(NoSchedulerHalf(), manager.block_size)
        self._blocks = connector
        self._manager = manager
        self._cache = manager.cache
        self._hasher = manager.cache.hasher
        self._pool = manager.pool
        self._num_groups = len(manager.groups)
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
        if not request.is_final or not looks_up(sequence):
            return False
        num_tokens, names = self._wanted(sequence, self._manager.get_computed_blocks(sequence).num_tokens)
        if not num_tokens:
            return False
        self._asked[request.request_id] = request
        is_expected = request.message.transfer is not None and request.message.transfer.fetch is not None
        if not self._blocks.ask(request.request_id, names, is_expected=is_expected):
            return False
        self._waiting[request.request_id] = request
        return True

    def arrived(self) -> list[Request]:
        if not self._asked:
            return []
        numbers = self._blocks.arrived()
        arrived = [self._waiting.pop(number) for number in numbers if number in self._waiting]
        # Who has begun has loaded it. Of who has ended nobody tells: some are looked at in each step.
        looked_at = [*self._beginning, *islice(self._asked.values(), _NUM_LOOKED_AT)]
        self._beginning = []
        for request in looked_at:
            self._look_at(request)
        return [request for request in arrived if request.status is Status.WAITING]

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
        if not looks_up(sequence):
            return None, 0
        num_tokens, names = self._wanted(sequence, num_computed)
        near = self._blocks.near(names)
        whole = len(near) // self._num_groups
        if not whole:
            return None, 0
        num_tokens = min(num_tokens, whole * self.block_size)
        reach = num_computed // self.block_size + whole
        uncut = sequence.request.uncut_blocks(reach, self.block_size)
        if uncut < reach:
            whole -= reach - uncut
            num_tokens = whole * self.block_size
        if num_tokens <= 0:
            return None, 0
        return _Near(num_computed + num_tokens, near[: whole * self._num_groups]), num_tokens

    def _wanted(self, sequence: Sequence, num_computed: int) -> tuple[int, list[bytes]]:
        """How many tokens behind the first num_computed could come, and the names of the blocks that they lie in: of
        each block the names of all groups."""
        size = self.block_size
        if num_computed % size:
            return 0, []
        # as with any prefix: at least one token is always computed
        end = sequence.num_known_tokens - 1
        transfer = sequence.request.message.transfer
        is_fetched = transfer is not None and transfer.fetch is not None
        if transfer is not None and is_fetched:
            end = min(end, transfer.num_fetch_tokens)
        contents = self._hasher.hashes(sequence, end // size)[num_computed // size :]
        num_tokens = len(contents) * size
        if is_fetched and end % size and end > num_computed:
            contents = [*contents, self._name_of_end(sequence, end)]
            num_tokens = end - num_computed
        return num_tokens, [self._blocks.name_of(group, one) for one in contents for group in range(self._num_groups)]

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
        if (key := self._pool.key_of(block)) is None:
            return None
        name = self._blocks.name_of(*key)
        return BlockSpill(name=name, block=block) if self._blocks.wants(name) else None

    def _ends_of(self, sequence: Sequence) -> list[BlockSpill]:
        """The last block of its prompt, if it is partly filled."""
        length = sequence.request.num_prompt_tokens
        index = length // self.block_size
        if not length % self.block_size:
            return []
        content = self._name_of_end(sequence, length)
        return [
            BlockSpill(name=self._blocks.name_of(group, content), block=table[index])
            for group, table in enumerate(sequence.block_tables)
        ]

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
