"""The router: keeps the numbers of the replicas as events tell of them, and asks its policy.

    choose        which replica is to get a prompt, given by the names of its full blocks
    begin, first_token, end     what becomes of a request
    stored, removed, cleared    what a replica's prefix cache gains and loses
    add, remove                 replicas come and go

Names of blocks are numbers (chain_hashes.public_name). Whoever calls it says when things happen; it has no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from quire.routing.policies import POLICIES
from quire.routing.prefixes import HeldPrefixes

# the names of replicas are the bits of a number
MOST_REPLICAS = 4096


@dataclass(slots=True)
class Replica:
    """What a policy knows of one."""

    number: int
    seconds_per_token: float = 0.0
    # a step of one token
    seconds_per_step: float = 0.0
    # in flight, and of their prompts what was not computed yet
    num_sequences: int = 0
    num_waiting_tokens: int = 0
    # requests so far
    num_begun: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and how much of its prompt is expected there."""

    replica: int
    num_cached_tokens: int


@dataclass(slots=True)
class _Request:
    replica: int
    num_sequences: int
    num_waiting_tokens: int
    blocks: Sequence[int]


class Router:
    """Of one service. A request is named by whatever its caller likes."""

    def __init__(self, policy: str = "least_time", block_size: int = 16) -> None:
        self._policy = POLICIES[policy]()
        self._block_size = block_size
        self._replicas: dict[int, Replica] = {}
        # as the policy sees them, and the same as bits
        self._serving: list[Replica] = []
        self._members = 0
        self._prefixes = HeldPrefixes()
        self._requests: dict[Hashable, _Request] = {}

    # ------------------------------------------------------------------------------------------ replicas

    def add(self, number: int, *, seconds_per_token: float = 0.0, seconds_per_step: float = 0.0) -> None:
        """One that takes requests from now on, with an empty cache."""
        assert 0 <= number < MOST_REPLICAS
        assert number not in self._replicas
        # a replica that tells no times still has tokens to compute
        self._replicas[number] = Replica(number, seconds_per_token or 1e-3, seconds_per_step)
        self._look()

    def remove(self, number: int) -> None:
        """It is gone, with what it held and all that ran there."""
        if self._replicas.pop(number, None) is None:
            return
        for name in [name for name, request in self._requests.items() if request.replica == number]:
            self._forget(self._requests.pop(name))
        self._prefixes.cleared(number)
        self._look()

    def _look(self) -> None:
        self._serving = list(self._replicas.values())
        self._members = sum(1 << number for number in self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def replicas(self) -> list[Replica]:
        """As they stand now; not to be changed."""
        return self._serving

    # ------------------------------------------------------------------------------------------ requests

    def choose(self, blocks: Sequence[int], num_tokens: int, num_sequences: int = 1) -> Choice:
        """`blocks`: names of the prompt's full blocks; `num_tokens`: all of it. There must be a replica."""
        size = self._block_size
        cached: dict[int, int] = {}
        # the last token is always computed
        most = num_tokens - 1
        for length, members in self._prefixes.lengths(blocks, self._members):
            tokens = min(length * size, most)
            while members:
                lowest = members & -members
                cached[lowest.bit_length() - 1] = tokens
                members ^= lowest
        replica = self._policy.choose(self._serving, num_tokens, cached, num_sequences)
        return Choice(replica.number, cached.get(replica.number, 0))

    def begin(
        self, name: Hashable, choice: Choice, blocks: Sequence[int], num_tokens: int, num_sequences: int = 1
    ) -> None:
        """The request was sent there."""
        waiting = num_tokens - choice.num_cached_tokens
        self._requests[name] = _Request(choice.replica, num_sequences, waiting, blocks)
        replica = self._replicas[choice.replica]
        replica.num_sequences += num_sequences
        replica.num_waiting_tokens += waiting
        replica.num_begun += 1
        self._prefixes.comes(choice.replica, blocks)

    def first_token(self, name: Hashable) -> None:
        """Its prompt has been computed."""
        request = self._requests.get(name)
        if request is not None:
            self._replicas[request.replica].num_waiting_tokens -= request.num_waiting_tokens
            request.num_waiting_tokens = 0

    def end(self, name: Hashable) -> None:
        """Of its own, or aborted, or failed. May be called again."""
        request = self._requests.pop(name, None)
        if request is not None:
            replica = self._replicas[request.replica]
            replica.num_sequences -= request.num_sequences
            replica.num_waiting_tokens -= request.num_waiting_tokens
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        self._prefixes.came(request.replica, request.blocks)

    # ------------------------------------------------------------------------------------------ what they hold

    def stored(self, number: int, blocks: Iterable[int]) -> None:
        if number in self._replicas:
            self._prefixes.stored(number, blocks)

    def removed(self, number: int, blocks: Iterable[int]) -> None:
        self._prefixes.removed(number, blocks)

    def cleared(self, number: int) -> None:
        self._prefixes.cleared(number)

    def statistics(self) -> dict[str, float]:
        return {"routed_blocks": len(self._prefixes), "routed_requests_open": len(self._requests)}
