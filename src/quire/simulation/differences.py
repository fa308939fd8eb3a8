"""Where two runs part: the step, the request, what of it, and both values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.messages import StepOutput, split_sequence_id
from quire.observability.run_records import Answered, Decided

_MOST_SHOWN = 400
# what each entry is, and which part of it is a row
_COLUMNS = {
    "block_writes": ("group, row, index, block", 1),
    "swapped_out": ("block, host block", None),
    "swapped_in": ("host block, block", None),
    "block_copies": ("from, to", None),
}
_ENTRIES = {
    "forked": ("parent row, row, sequence, tokens, computed", 1),
    "released": ("row", None),
    "admitted": ("row, sequence, tokens, computed, adapter", 0),
    "progress": ("row, computed", 0),
    "appended": ("row, tokens, is final", 0),
    "masked": ("row", None),
}
# counts of a step say how long things took, among others
_OF_ANSWERS = ("failures", "candidates", "speculated", "vectors", "logprobs", "prompt_logprobs")


@dataclass(frozen=True)
class Difference:
    step: int
    # seconds since the log began
    at: float
    field: str
    recorded: str
    replayed: str
    request: str = ""

    def picture(self) -> str:
        lines = [f"step {self.step}, {self.at:.3f} s after the start: the first difference"]
        if self.request:
            lines.append(f"  request   {self.request}")
        lines.append(f"  field     {self.field}")
        lines.append(f"  recorded  {_cut(self.recorded)}")
        lines.append(f"  replayed  {_cut(self.replayed)}")
        return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class RowOwners:
    """Which sequence is in a row, and which rows have failed, as far as the log tells."""

    def __init__(self) -> None:
        self._sequences: dict[int, int] = {}
        # rows that have failed, and the step in which each begins anew
        self._failed: dict[int, float] = {}

    def follow(self, decided: Decided) -> None:
        for _, row, sequence_id, *_ in decided.forked:
            self._begin(row, sequence_id, decided.step)
        for row, sequence_id, *_ in decided.admitted:
            self._begin(row, sequence_id, decided.step)

    def _begin(self, row: int, sequence_id: int, step: int) -> None:
        self._sequences[row] = sequence_id
        if row in self._failed:
            self._failed[row] = min(self._failed[row], step)

    def lose(self, answer: StepOutput) -> None:
        """A worker that is not hurt goes on with rows that have failed in the recorded run."""
        for row in answer.failures:
            self._failed[row] = float("inf")

    def has_failed(self, row: int, step: int) -> bool:
        return step < self._failed.get(row, 0.0)

    def name_of(self, row: int) -> str:
        if row not in self._sequences:
            return f"row {row}"
        request, index = split_sequence_id(self._sequences[row])
        return f"{request}, sequence {index} (row {row})"


def difference_of_decisions(recorded: Decided, replayed: Decided, owners: RowOwners) -> Difference | None:
    """The first thing in which two decisions differ."""
    if recorded.step != replayed.step:
        return Difference(recorded.step, recorded.at, "step", str(recorded.step), str(replayed.step))
    for name, (meaning, place) in _ENTRIES.items():
        before = [_plain(entry) for entry in getattr(recorded, name)]
        after = [_plain(entry) for entry in getattr(replayed, name)]
        if before != after:
            return _of_entries(recorded, name, meaning, before, after, place, owners)
    for name, (meaning, place) in _COLUMNS.items():
        columns = getattr(recorded, name), getattr(replayed, name)
        if not np.array_equal(*columns):
            lists = [column.T.tolist() for column in columns]
            return _of_entries(recorded, name, meaning, lists[0], lists[1], place, owners)
    of_rows: dict[str, tuple[Any, Any]] = {"": (recorded.num_tokens, replayed.num_tokens)}
    of_rows |= {name: (recorded.data.get(name), replayed.data.get(name)) for name in {*recorded.data, *replayed.data}}
    for name, columns in sorted(of_rows.items()):
        pairs = [
            _with_rows(decided.rows, column) for decided, column in zip((recorded, replayed), columns, strict=True)
        ]
        if pairs[0] != pairs[1]:
            meaning = f"row, {name or 'tokens that it computes'}"
            return _of_entries(recorded, name or "rows", meaning, pairs[0], pairs[1], 0, owners)
    return None


def _with_rows(rows: Any, column: Any) -> list[Any]:
    if column is None:
        return []
    values: list[Any] = np.asarray(column).tolist()
    if len(values) != len(rows):
        return values
    return [[row, value] for row, value in zip(rows.tolist(), values, strict=True)]


def _plain(entry: Any) -> Any:
    return [_plain(part) for part in entry] if isinstance(entry, tuple | list) else entry


def _of_entries(
    recorded: Decided,
    name: str,
    meaning: str,
    before: list[Any],
    after: list[Any],
    place: int | None,
    owners: RowOwners,
) -> Difference:
    number = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
    if number is None:
        number = min(len(before), len(after))
    shown = [str(entries[number]) if number < len(entries) else "nothing" for entries in (before, after)]
    entry = before[number] if number < len(before) else after[number]
    request = "" if place is None else owners.name_of(int(entry[place]))
    if name in ("released", "masked"):
        request = owners.name_of(int(entry))
    field = f"{name}, entry {number} of {len(before)} ({meaning})"
    return Difference(recorded.step, recorded.at, field, shown[0], shown[1], request)


def difference_of_answers(recorded: Answered, answer: StepOutput, owners: RowOwners) -> Difference | None:
    """The same of what a step brought, but for rows that had failed in the recorded run."""
    expected = recorded.answer
    step = expected.step

    def tokens(of: StepOutput) -> list[list[int]]:
        pairs = zip(of.rows.tolist(), of.token_ids.tolist(), strict=True)
        return [[row, token_id] for row, token_id in pairs if not owners.has_failed(row, step)]

    before, after = tokens(expected), tokens(answer)
    if before != after:
        number = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), None)
        if number is None:
            number = min(len(before), len(after))
        row = (before[number] if number < len(before) else after[number])[0]
        shown = [str(found[number][1]) if number < len(found) else "none" for found in (before, after)]
        return Difference(step, recorded.at, "token", shown[0], shown[1], owners.name_of(row))
    for name in _OF_ANSWERS:
        values = [_by_row(getattr(of, name), step, owners) for of in (expected, answer)]
        for row in sorted({*values[0], *values[1]}):
            first, second = values[0].get(row), values[1].get(row)
            if first != second:
                return Difference(step, recorded.at, name, str(first), str(second), owners.name_of(row))
    return None


def _by_row(values: Any, step: int, owners: RowOwners) -> dict[int, Any]:
    found = {column[0]: column[1:] for column in values.T.tolist()} if isinstance(values, np.ndarray) else values
    return {row: value for row, value in found.items() if not owners.has_failed(row, step)}
