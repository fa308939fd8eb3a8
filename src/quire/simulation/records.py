"""What became of each request, and what an engine did: numbers that a summary is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from quire.simulation.gaps import Gaps


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of the virtual clock; -1: it did not happen."""

    number: int
    replica: int
    arrived_at: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    # of all its sequences
    num_output_tokens: int = 0
    first_token_at: float = -1.0
    last_token_at: float = -1.0
    ended_at: float = -1.0
    error: str = ""
    # sequences that have not ended
    num_open: int = 1
    num_sequences: int = 1

    def __reduce__(self) -> tuple[type[Record], tuple[Any, ...]]:
        """As many values, and not by name: thousands go from one process to another."""
        return Record, _values_of(self)

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def latency(self) -> float:
        return self.ended_at - self.arrived_at

    @property
    def tpot(self) -> float:
        """Of the tokens behind the first one, of each sequence."""
        num_more = self.num_output_tokens / self.num_sequences - 1
        return (self.last_token_at - self.first_token_at) / num_more if num_more > 0 else 0.0

    @property
    def normalized_latency(self) -> float:
        """3.6.1: per token of the answer."""
        return self.latency * self.num_sequences / max(1, self.num_output_tokens)


_values_of = attrgetter(*Record.__slots__)


@dataclass(slots=True)
class EngineWork:
    """What an engine's devices did, added up over its steps."""

    busy_seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    # sequences in the steps, by step and by second
    rows_by_step: int = 0
    row_seconds: float = 0.0
    # blocks that were held, by second
    block_seconds: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)

    def add(self, later: EngineWork) -> None:
        """What it did behind that."""
        for name in ("busy_seconds", "num_steps", "num_tokens", "rows_by_step", "row_seconds", "block_seconds"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.gaps.merge(later.gaps)
