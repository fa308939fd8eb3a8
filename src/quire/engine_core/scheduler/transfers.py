"""KV that comes from elsewhere or goes there (4.4.4): between sequences and the scheduler half of a connector.

What is fetched counts as computed, like a prefix that the cache has; only the blocks that are missing here are moved.
Collects what the worker half must do in a step. Called by the scheduler; a connector knows keys, tokens and blocks, and
neither requests nor sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.engine_core.request import Request, Sequence
from quire.engine_core.scheduler.prerequisites import Prerequisite
from quire.kv_connectors.connector import STEP_DATA, BlockLoad, BlockStore, Found, SchedulerHalf, StepTransfers
from quire.messages import KVTransfer


@dataclass(frozen=True)
class Fetch:
    sequence: Sequence
    found: Found
    # beyond what is here
    num_tokens: int
    # the blocks of the prefix that they lie in: [first, last)
    first: int
    last: int


class Transfers(Prerequisite):
    """Asked for requests with a transfer alone. One that asks for what no connector can do is refused."""

    def __init__(self, connector: SchedulerHalf, block_size: int) -> None:
        self._connector = connector
        self.block_size = block_size
        # of the step that is being decided, by sequence
        self.fetches: dict[int, Fetch] = {}
        # by request: the sequence whose prompt is stored as soon as it is computed
        self.to_store: dict[int, Sequence] = {}
        self._num_fetched_tokens = self._num_fetched_blocks = self.num_stored_blocks = 0

    def concerns(self, request: Request) -> bool:
        """Whether KV of it could come from elsewhere, or is to go there."""
        return request.message.transfer is not None

    def reason_to_refuse(self, request: Request) -> str | None:
        transfer = request.message.transfer
        if transfer is None:
            return None
        num_sent = len(request.message.prompt_token_ids)
        if not 0 <= transfer.num_output_tokens < max(1, num_sent):
            return f"transfer: num_output_tokens={transfer.num_output_tokens} of {num_sent} tokens that were sent."
        if transfer.num_output_tokens and num_sent >= request.max_total:
            return f"transfer: nothing is left to generate; {num_sent} of at most {request.max_total} tokens are there."
        if transfer.num_output_tokens and (request.num_sequences > 1 or not request.message.is_final):
            return "transfer: what was sampled elsewhere goes on as one sequence, and has come whole."
        if transfer.fetch is not None and transfer.num_fetch_tokens <= 0:
            return "transfer: fetch needs num_fetch_tokens, the number of tokens that lie there."
        return self._reason_of_connector(transfer)

    def _reason_of_connector(self, transfer: KVTransfer) -> str | None:
        return self._connector.reason_to_refuse(transfer)

    # ------------------------------------------------------------------------------------------ what can be had

    def num_found(self, sequence: Sequence, num_computed: int) -> int:
        """How many tokens beyond the first num_computed, which are here, could be fetched. Changes nothing."""
        return self._look_up(sequence, num_computed)[1]

    def begin(self, sequence: Sequence, num_computed: int) -> int:
        """The same, and they are fetched if the sequence begins now; what is to be stored is remembered."""
        # of one that has given way in this step, and begins again
        self.fetches.pop(sequence.sequence_id, None)
        transfer = sequence.request.message.transfer
        is_new = not sequence.request.was_started or sequence.request.request_id in self.to_store
        if transfer is not None and transfer.store is not None and sequence.index == 0 and is_new:
            self.to_store[sequence.request.request_id] = sequence
        found, num_tokens = self._look_up(sequence, num_computed)
        if found is not None and num_tokens:
            first = num_computed // self.block_size
            last = -(-(num_computed + num_tokens) // self.block_size)
            self.fetches[sequence.sequence_id] = Fetch(sequence, found, num_tokens, first, last)
        return num_tokens

    def _look_up(self, sequence: Sequence, num_computed: int) -> tuple[Found | None, int]:
        transfer = sequence.request.message.transfer
        if transfer is None or transfer.fetch is None or not sequence.looks_up:
            return None, 0
        # as with any prefix: at least one token is always computed
        limit = min(transfer.num_fetch_tokens, sequence.num_known_tokens - 1)
        if limit <= num_computed:
            return None, 0
        found = self._connector.find(transfer.fetch, sequence.token_ids(0, limit))
        return found, 0 if found is None else max(0, min(found.num_tokens, limit) - num_computed)

    # ------------------------------------------------------------------------------------------ what a step moves

    @property
    def are_pending(self) -> bool:
        """Something is to be moved, or will be."""
        return bool(self.fetches or self.to_store)

    def step_data(self) -> dict[str, Any]:
        """What the worker half must do in the step that has just been decided; asked if something is to be moved."""
        if not self.are_pending:
            return {}
        step = StepTransfers(
            loads=self._take_loads(),
            stores=[self._store(sequence) for sequence in self._take_computed()],
        )
        return {STEP_DATA: step} if step.loads or step.stores else {}

    def _take_loads(self) -> list[BlockLoad]:
        fetches = self.fetches
        self.fetches = {}
        # some have found too few blocks, or have given way since
        return [self._load(fetch) for fetch in fetches.values() if fetch.sequence.is_begun]

    def _load(self, fetch: Fetch) -> BlockLoad:
        blocks = self._blocks_to_load(fetch)
        self._num_fetched_blocks += sum(map(len, blocks))
        self._num_fetched_tokens += fetch.num_tokens
        first, source = self._source_of(fetch)
        return BlockLoad(row=fetch.sequence.row, source=source, first_block=first, blocks=blocks)

    def _blocks_to_load(self, fetch: Fetch) -> list[list[int]]:
        return blocks_of(fetch.sequence, fetch.first, fetch.last)

    def _source_of(self, fetch: Fetch) -> tuple[int, Any]:
        """Which of its blocks is the first one that is needed, and what the worker half must know."""
        return fetch.first, self._connector.load(fetch.found)

    def _take_computed(self) -> list[Sequence]:
        """Those whose prompt is complete after the step."""
        computed = []
        for number, sequence in list(self.to_store.items()):
            request = sequence.request
            if request.sequences.get(sequence.index) is not sequence:
                del self.to_store[number]
            elif request.is_final and sequence.is_begun and sequence.num_computed_tokens >= request.num_prompt_tokens:
                del self.to_store[number]
                computed.append(sequence)
        return computed

    def _store(self, sequence: Sequence) -> BlockStore:
        transfer = sequence.request.message.transfer
        length = sequence.request.num_prompt_tokens
        assert transfer is not None
        assert transfer.store is not None
        blocks = blocks_of(sequence, 0, -(-length // self.block_size))
        self.num_stored_blocks += sum(map(len, blocks))
        tokens = sequence.token_ids(0, length).copy()
        return BlockStore(row=sequence.row, key=transfer.store, token_ids=tokens, blocks=blocks)

    def statistics(self) -> dict[str, float]:
        return {
            "fetched_tokens_total": self._num_fetched_tokens,
            "fetched_blocks_total": self._num_fetched_blocks,
            "stored_blocks_total": self.num_stored_blocks,
            **self._statistics_of_connector(),
        }

    def _statistics_of_connector(self) -> dict[str, float]:
        return self._connector.statistics()


def blocks_of(sequence: Sequence, first: int, last: int) -> list[list[int]]:
    """By group of layers."""
    return [table.blocks[first:last].tolist() for table in sequence.block_tables]
