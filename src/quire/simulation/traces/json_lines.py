"""Quire's own form: a line of JSON a request.

    {"at": 0.5, "prompt_tokens": 900, "output_tokens": 120}
    {"at": 0.9, "prompt_tokens": 900, "output_tokens": 60, "prefix": [[17, 512]], "n": 4, "priority": 1}

`at` is in seconds. `prefix`: with which contents the prompt begins, each a number that names it and its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import suggestion
from quire.sampling_params import MAX_N
from quire.simulation.arrivals import Arrival
from quire.simulation.traces.table import ReadTrace, TraceError, in_order, lines_of, whole_number

# seconds; a number that no float holds is none
_LATEST = 10**15
FIELDS = ("at", "prompt_tokens", "output_tokens", "prefix", "n", "beam_search", "priority")


def objects_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line that has one."""
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{place}: is no JSON ({error}).") from None
        if not isinstance(found, dict):
            raise TraceError(f"{place}: must be an object, as {{...}}.")
        yield place, found


def seconds_of(place: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LATEST:
        raise TraceError(f"{place}: {name}={str(value)[:40]} must be a time, 0 or more.")
    return float(value)


def read(path: Path) -> ReadTrace:
    table = [_arrival(place, line) for place, line in objects_of(path)]
    return in_order(path.name, table, has_contents=any(one.pieces for one in table))


def _arrival(place: str, line: dict[str, Any]) -> Arrival:
    unknown = next((name for name in line if name not in FIELDS), None)
    if unknown is not None:
        hint = suggestion(unknown, FIELDS) or ""
        raise TraceError(f"{place}: {unknown[:40]}: there are {', '.join(FIELDS)} (or Mooncake's hash_ids).{hint}")
    num_prompt = whole_number(place, "prompt_tokens", line.get("prompt_tokens"), least=1)
    n = whole_number(place, "n", line.get("n", 1), least=1)
    if n > MAX_N:
        raise TraceError(f"{place}: n={n} must be at most {MAX_N}.")
    return Arrival(
        at=seconds_of(place, "at", line.get("at")),
        num_prompt_tokens=num_prompt,
        num_output_tokens=whole_number(place, "output_tokens", line.get("output_tokens"), least=1),
        pieces=_pieces(place, line.get("prefix", []), num_prompt),
        num_sequences=n,
        is_beam_search=_yes_or_no(place, "beam_search", line.get("beam_search", False)),
        priority=whole_number(place, "priority", line.get("priority", 0)),
    )


def _yes_or_no(place: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TraceError(f"{place}: {name}={str(value)[:40]} must be true or false.")
    return value


def _pieces(place: str, value: object, num_prompt: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) == 2 for one in value):
        raise TraceError(f"{place}: prefix must be a list of [name, tokens].")
    pieces = tuple(
        (whole_number(place, "prefix", name), whole_number(place, "prefix", tokens, least=1)) for name, tokens in value
    )
    if sum(tokens for _, tokens in pieces) > num_prompt:
        raise TraceError(f"{place}: prefix has more tokens than the prompt, {num_prompt}.")
    return pieces
