"""What a recorder keeps of steps and of blocks, and how it is read again.

Plain tuples, because one is made in every step; columns are packed bytes of int64. A step whose sequences are those of
the step before shares its columns with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from quire.messages import IntArray
from quire.observability.decisions import Decision

# step, when it was decided, sequences, their tokens, (running, waiting, gave way, blocks held, blocks cached)
RecordedStep: TypeAlias = tuple[int, float, bytes, bytes, tuple[int, int, int, int, int]]
# step, kind, columns
BlockChange: TypeAlias = tuple[int, str, bytes]
# columns of each kind: of the pool's, the block alone
COLUMNS = {"attached": 3, "swapped_out": 2, "swapped_in": 2, "copied": 2}


@dataclass(frozen=True)
class Step:
    """One step, read: seconds on the engine's clock; `ended` is 0 where its results have not come."""

    step: int
    began: float
    ended: float
    sequence_ids: IntArray
    num_tokens: IntArray
    num_running: int
    num_waiting: int
    num_preempted: int
    num_held: int
    num_cached: int


@dataclass(frozen=True)
class Change:
    """Of blocks. attached: (sequence, index, block) columns; swapped_out: (block, host block); swapped_in: (host
    block, block); copied: (source, target); all others: (block,)."""

    step: int
    kind: str
    columns: IntArray


def read_step(entry: Sequence[Any], ended: float) -> Step:
    step, began, ids, tokens, counts = entry
    return Step(step, began, ended, np.frombuffer(ids, dtype=np.int64), np.frombuffer(tokens, dtype=np.int64), *counts)


def read_change(entry: Sequence[Any]) -> Change:
    step, kind, columns = entry
    return Change(step, kind, np.frombuffer(columns, dtype=np.int64).reshape(COLUMNS.get(kind, 1), -1))


@dataclass
class Recording:
    """What a recorder had, oldest first. Times are seconds on the engine's clock; `now` is when it was read."""

    now: float
    num_blocks: int
    block_size: int
    steps: list[Step]
    decisions: list[Decision]
    changes: list[Change]

    def words(self) -> list[str]:
        """The decisions, one a line."""
        return [f"step {decision.step}: {decision.words()}" for decision in self.decisions]
