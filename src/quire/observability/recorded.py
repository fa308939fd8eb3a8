"""What a recorder keeps of steps and of blocks, how it is sent, and how it is read again.

A recorder keeps what it is given, because a hook must cost next to nothing; here it becomes columns of int64, as packed
bytes, when somebody asks for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from quire.messages import IntArray
from quire.observability.decisions import Decision

# step, when it was decided, sequence by row, rows, their tokens, counts (Recorder)
RecordedStep: TypeAlias = tuple[int, float, IntArray, IntArray, IntArray, tuple[int, int, int, int, int]]
# step, when, kind, request, sequence, amount, other, why
RecordedDecision: TypeAlias = tuple[int, float, str, int, int, int, int, str]
# step, kind, what was given
RecordedChange: TypeAlias = tuple[int, str, Any]
# columns of each kind that is sent; of the others one, the blocks
_NUM_COLUMNS = {"attached": 3, "swapped_out": 2, "swapped_in": 2, "copied": 2}


# ---------------------------------------------------------------------------------------------- sending


def sent_steps(entries: Sequence[RecordedStep], ends: Sequence[tuple[float, int]]) -> list[tuple[Any, ...]]:
    """(step, began, ended, sequences, tokens, counts). `ends`: of each, and how many tokens of each row it has computed
    beyond those it was granted."""
    sent = []
    for (step, began, owners, rows, tokens, counts), (ended, num_more) in zip(entries, ends, strict=True):
        sent.append((step, began, ended, owners[rows].tobytes(), (tokens + num_more).tobytes(), counts))
    return sent


def sent_changes(entries: Sequence[RecordedChange]) -> list[tuple[int, str, bytes]]:
    """(step, kind, columns); what was kept as one may be two: blocks that were evicted and then handed out."""
    return [(step, name, columns) for step, kind, content in entries for name, columns in _columns_of(kind, content)]


def _columns_of(kind: str, content: Any) -> Iterator[tuple[str, bytes]]:
    if kind == "attached":
        owners, writes = content
        yield kind, np.concatenate([owners[writes[1]], writes[2], writes[3]]).tobytes()
    elif kind == "allocated":
        blocks, num_evicted = content
        if num_evicted:
            yield "evicted", _packed(blocks[-num_evicted:])
        yield kind, _packed(blocks)
    elif kind == "released":
        blocks, freed = content
        is_freed = set(freed)
        yield "freed", _packed(freed)
        yield "cached", _packed([block for block in blocks if block not in is_freed])
    elif isinstance(content, list):
        yield kind, _packed(content)
    else:
        yield kind, content.tobytes()


def _packed(blocks: Sequence[int]) -> bytes:
    return array("q", blocks).tobytes()


# ---------------------------------------------------------------------------------------------- reading


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


def read_step(entry: Sequence[Any]) -> Step:
    step, began, ended, ids, tokens, counts = entry
    return Step(step, began, ended, np.frombuffer(ids, dtype=np.int64), np.frombuffer(tokens, dtype=np.int64), *counts)


def read_change(entry: Sequence[Any]) -> Change:
    step, kind, columns = entry
    return Change(step, kind, np.frombuffer(columns, dtype=np.int64).reshape(_NUM_COLUMNS.get(kind, 1), -1))


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
