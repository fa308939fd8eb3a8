"""How one of several replicas is chosen. A policy sees the numbers of replicas and of the request, and keeps nothing
but its turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quire.routing.router import Replica

# no replica has more than so many times the sequences of the mean
MOST_OF_MEAN = 1.25
# Up to so many sequences a replica counts as not loaded: a step takes hardly longer than with one, and the mean of few
# is nearly always exceeded by somebody.
UNLOADED = 12
# A step computes what waits together, so a queue that is longer by half a step is hardly felt; computing again what
# another replica holds is work that all others wait for. Without it chats leave their replicas when queues differ by
# two or three short prompts (benchmarks/routing.py).
PATIENCE_TOKENS = 1024


class Policy(Protocol):
    def choose(
        self, replicas: Sequence[Replica], num_tokens: int, cached: dict[int, int], num_sequences: int
    ) -> Replica:
        """One of these, which are not none. `cached`: by the number of a replica, how many of the prompt's tokens it
        holds."""


class LeastTime:
    """The least predicted time to the first token, among those that do not have more than their share.

        (tokens that wait there + those of the prompt - those it holds) x seconds a token + a step

    Who holds more of the prompt is preferred while its queue is not much longer. A replica that is full sends a hot
    prefix on to another one, which computes it once and holds it from then on.
    """

    def choose(
        self, replicas: Sequence[Replica], num_tokens: int, cached: dict[int, int], num_sequences: int
    ) -> Replica:
        total = num_sequences
        for replica in replicas:
            total += replica.num_sequences
        # rounded up: what is left of the last sequence must be somewhere
        most = max(UNLOADED, -int(-MOST_OF_MEAN * total // len(replicas)))
        held = cached.get
        best = None
        best_seconds = 0.0
        best_rest = (0, 0)
        holders = []
        for replica in replicas:
            load = replica.num_sequences
            if load + num_sequences > most and load:
                continue
            tokens = held(replica.number, 0)
            # each running sequence is a token of a step
            waiting = replica.num_waiting_tokens + num_tokens - tokens + load
            seconds = waiting * replica.seconds_per_token + replica.seconds_per_step
            # pairs for all of a thousand replicas would take a sixth of the time
            if best is None or seconds <= best_seconds:
                rest = (load, replica.num_begun)
                if best is None or seconds < best_seconds or rest < best_rest:
                    best, best_seconds, best_rest = replica, seconds, rest
            if tokens:
                holders.append((-tokens, (seconds, load, replica.num_begun), replica))
        if best is None:
            return _least_loaded(replicas)
        longest = best_seconds + PATIENCE_TOKENS * best.seconds_per_token
        near = [holder for holder in holders if holder[1][0] <= longest]
        return min(near, key=lambda holder: holder[:2])[2] if near else best


class LeastLoaded:
    """The fewest sequences, whatever it holds."""

    def choose(
        self, replicas: Sequence[Replica], num_tokens: int, cached: dict[int, int], num_sequences: int
    ) -> Replica:
        return _least_loaded(replicas)


class RoundRobin:
    """Each in its turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(
        self, replicas: Sequence[Replica], num_tokens: int, cached: dict[int, int], num_sequences: int
    ) -> Replica:
        ordered = sorted(replicas, key=lambda replica: replica.number)
        chosen = next((replica for replica in ordered if replica.number > self._last), ordered[0])
        self._last = chosen.number
        return chosen


POLICIES: dict[str, type[Policy]] = {
    "least_time": LeastTime,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def _least_loaded(replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.num_sequences, replica.num_begun, replica.number))
