"""The form of Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens (CSV)."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from quire.simulation.arrivals import Arrival
from quire.simulation.traces.table import ReadTrace, TraceError, in_order, lines_of, whole_number

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LENGTH_OF_TIME = len("2023-11-16 18:15:46")


def read(path: Path) -> ReadTrace:
    table = []
    lines = csv.reader(lines_of(path))
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        raise TraceError(f"{path}: the first line must be {','.join(COLUMNS)}, not {','.join(header)[:80]}.")
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        place = f"{path}, line {number}"
        if len(line) != len(COLUMNS):
            raise TraceError(f"{place}: {len(line)} columns, {len(COLUMNS)} are needed.")
        num_prompt = whole_number(place, COLUMNS[1], line[1], least=1)
        num_output = whole_number(place, COLUMNS[2], line[2], least=0)
        table.append(Arrival(_seconds(place, line[0]), num_prompt, max(1, num_output)))
    return in_order(path.name, table)


def _seconds(place: str, text: str) -> float:
    """Fractions of seven digits, which `datetime` cuts to six."""
    whole, _, fraction = text.partition(".")
    digits = fraction.partition("+")[0]
    try:
        if digits and not digits.isdecimal():
            raise ValueError(digits)  # a sign, or an underscore
        return _whole_seconds(whole) + (int(digits) / 10 ** len(digits) if digits else 0.0)
    except ValueError:
        raise TraceError(f"{place}: TIMESTAMP={text[:40]!r} must look like 2023-11-16 18:15:46.6805900.") from None


@lru_cache(maxsize=16)
def _whole_seconds(text: str) -> float:
    """Requests come in order, and several in a second."""
    if len(text) != _LENGTH_OF_TIME or text[10] != " ":
        raise ValueError(text)  # the system knows more forms
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
