"""The form of Mooncake's traces: a line of JSON a request, with the names of its prompt's blocks of 512 tokens.

A name stands for a block and all that comes before it, so prompts that share names begin alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.simulation.arrivals import Arrival
from quire.simulation.traces.json_lines import objects_of, seconds_of
from quire.simulation.traces.table import ReadTrace, TraceError, in_order, whole_number

BLOCK = 512


def read(path: Path) -> ReadTrace:
    table = [_arrival(place, line) for place, line in objects_of(path)]
    return in_order(path.name, table, has_contents=True)


def _arrival(place: str, line: dict[str, Any]) -> Arrival:
    num_prompt = whole_number(place, "input_length", line.get("input_length"), least=1)
    num_output = whole_number(place, "output_length", line.get("output_length"))
    names = line.get("hash_ids")
    if not isinstance(names, list) or len(names) != -(-num_prompt // BLOCK):
        raise TraceError(f"{place}: hash_ids must be a list of a name for each {BLOCK} tokens of input_length.")
    names = [whole_number(place, "hash_ids", name) for name in names]
    lengths = [BLOCK] * (len(names) - 1) + [num_prompt - BLOCK * (len(names) - 1)]
    at = seconds_of(place, "timestamp", line.get("timestamp")) / 1000
    return Arrival(at, num_prompt, max(1, num_output), tuple(zip(names, lengths, strict=True)))
