"""Some replicas compute prompts, the others go on from them (4.4.4): two fleets, and the links between.

    arrival --> a prefill replica, for one token --> its link, one prompt after the other --> a decode replica

What the decode replica has in its cache is not moved. A client has the first token when its prompt is computed, as from
`quire route`. Of several sequences of a request none is sampled elsewhere: the decode replica computes the end of the
prompt again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from quire.errors import OptionError
from quire.kv_connectors.connector import CacheLayout, Found, Tokens
from quire.messages import EngineRequest, KVTransfer
from quire.routing import Choice
from quire.simulation.arrivals import Requests
from quire.simulation.deployment import Deployment
from quire.simulation.fleet import Fleet
from quire.simulation.records import EngineWork, Record

# before the first byte of a prompt is on its way, and behind the last
_SECONDS_PER_MOVE = 1e-3
_SOMEWHERE = ""


@dataclass(frozen=True)
class Split:
    """So many replicas compute prompts, and so many go on from them."""

    num_prefill: int
    num_decode: int
    # between them; None: the link of the devices
    link_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class _Prefix:
    num_tokens: int


class AllIsThere:
    """The scheduler half of a connector that has whatever it is asked for: it comes when it has been moved."""

    def __init__(self, layout: CacheLayout) -> None:
        if layout.has_windows or layout.has_states:
            raise OptionError(
                f"prefill and decode: {layout.model} has sliding windows or recurrent layers, which cannot be moved "
                "yet. Give --replicas instead."
            )

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        return None

    def find(self, key: str, token_ids: Tokens) -> Found | None:
        return _Prefix(len(token_ids))

    def load(self, found: Found) -> Any:
        return None

    def statistics(self) -> dict[str, float]:
        return {}


@dataclass(slots=True)
class _Begun:
    """A request whose prompt is being computed, or moved."""

    request: EngineRequest
    record: Record | None = None
    replica: int = 0


class SplitFleet:
    """`on_end` gets the record of each request that has ended."""

    def __init__(
        self,
        deployment: Deployment,
        split: Split,
        on_end: Callable[[Record], None],
        **how: Any,
    ) -> None:
        """`how`: of both fleets."""
        if not deployment.move_seconds_per_block:
            raise OptionError(
                f"prefill and decode: nothing says how fast a link of {deployment.device.name} is. Take one with a "
                "data sheet."
            )
        own = deployment.device.link_bytes_per_second
        self._seconds_per_block = deployment.move_seconds_per_block * own / (split.link_bytes_per_second or own)
        behind = replace(deployment, make_half=lambda _, layout: AllIsThere(layout))
        self._prefill = Fleet(deployment, split.num_prefill, self._computed, **how)
        self._decode = Fleet(behind, split.num_decode, self._ended, **how)
        self._on_end = on_end
        self._block_size = deployment.config.block_size
        self._begun: dict[int, _Begun] = {}
        self._link_free_at = [0.0] * split.num_prefill
        # by when they are there: (time, number)
        self._moved: list[tuple[float, int]] = []
        # from the ends of prompts to when all of them is there
        self._seconds_of_moves = 0.0
        self._num_moved = 0
        self._num_blocks = 0

    def run(self, requests: Requests) -> None:
        """All of the trace."""
        for request, at in requests:
            self.add(request, at)
        self.advance()

    def works(self) -> list[EngineWork]:
        return [*self._prefill.works(), *self._decode.works()]

    def statistics(self) -> list[dict[str, float]]:
        return [*self._prefill.statistics(), *self._decode.statistics()]

    def add(self, request: EngineRequest, at: float) -> None:
        """It arrives; nothing arrives before it any more."""
        self.advance(at)
        self._begun[request.request_id] = _Begun(request)
        one = msgspec.structs.replace(request.sampling, max_tokens=1)
        self._prefill.add(msgspec.structs.replace(request, sampling=one), at)

    def advance(self, until: float = math.inf) -> None:
        """All that happens before that time. A prompt that is computed later is there later."""
        self._prefill.advance(until)
        self._advance_decode(until)

    def _advance_decode(self, until: float) -> None:
        while self._moved and self._moved[0][0] < until:
            self._go_on(*heapq.heappop(self._moved))
        self._decode.advance(until)

    def summary(self) -> dict[str, Any]:
        num_prompts = self._num_moved
        mean = self._seconds_of_moves / max(1, num_prompts)
        return {"moved": {"prompts": num_prompts, "blocks": self._num_blocks, "seconds_mean": mean}}

    # ------------------------------------------------------------------------------------------ of one request

    def _computed(self, record: Record) -> None:
        begun = self._begun[record.number]
        request = begun.request
        if record.error or request.sampling.max_tokens == 1:
            del self._begun[record.number]
            self._on_end(record)
            return
        begun.record = record
        # what is chosen now knows what is true now
        self._advance_decode(record.ended_at)
        choice = self._decode.choose(_behind(request, self._block_size))
        begun.replica = choice.replica
        heapq.heappush(self._moved, (self._move(record, choice), record.number))

    def _move(self, record: Record, choice: Choice) -> float:
        """When all of its blocks are there."""
        num_blocks = -(-record.num_prompt_tokens // self._block_size) - choice.num_cached_tokens // self._block_size
        begins = max(record.ended_at, self._link_free_at[record.replica])
        ends = begins + num_blocks * self._seconds_per_block
        self._link_free_at[record.replica] = ends
        self._num_moved += 1
        self._num_blocks += num_blocks
        self._seconds_of_moves += ends + _SECONDS_PER_MOVE - record.ended_at
        return ends + _SECONDS_PER_MOVE

    def _go_on(self, at: float, number: int) -> None:
        begun = self._begun[number]
        self._decode.advance(at)
        self._decode.place(_behind(begun.request, self._block_size), begun.replica, at)

    def _ended(self, record: Record) -> None:
        begun = self._begun.pop(record.number)
        first = begun.record
        assert first is not None
        record.arrived_at = first.arrived_at
        record.num_prompt_tokens = first.num_prompt_tokens
        record.num_cached_tokens = first.num_cached_tokens
        if begun.request.sampling.n == 1 and begun.request.decoding is None:
            record.num_output_tokens += 1
            self._decode.replicas[record.replica].work.gaps.add([record.first_token_at - first.first_token_at])
            record.first_token_at = first.first_token_at
        self._on_end(record)


def _behind(request: EngineRequest, block_size: int) -> EngineRequest:
    """The same for who goes on."""
    length = len(request.prompt_token_ids)
    if request.sampling.n > 1 or request.decoding is not None:
        num_whole = (length - 1) // block_size * block_size
        transfer = KVTransfer(fetch=_SOMEWHERE, num_fetch_tokens=num_whole) if num_whole else None
        return msgspec.structs.replace(request, transfer=transfer)
    tokens: Any = np.append(request.prompt_token_ids, np.int32(0))
    transfer = KVTransfer(fetch=_SOMEWHERE, num_fetch_tokens=length, num_output_tokens=1)
    return msgspec.structs.replace(request, prompt_token_ids=tokens, transfer=transfer)
