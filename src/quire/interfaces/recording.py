"""The engine's recording, fetched in pieces, so that no step waits for all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.interfaces.engine_calls import EngineCalls
from quire.observability.decisions import Decision
from quire.observability.recorded import Recording, read_change, read_step


async def read_recording(engine: EngineCalls) -> Recording:
    """Everything that the recorder still has. Without a recorder it raises a UserError that names the option."""
    pieces = {}
    for part in ("steps", "decisions", "changes"):
        pieces[part] = await _pieces_of(engine, part)
    last = pieces["changes"][-1]
    return Recording(
        now=last["now"],
        num_blocks=last["num_blocks"],
        block_size=last["block_size"],
        steps=[read_step(entry) for piece in pieces["steps"] for entry in piece["entries"]],
        decisions=decisions_of(entry for piece in pieces["decisions"] for entry in piece["entries"]),
        changes=[read_change(entry) for piece in pieces["changes"] for entry in piece["entries"]],
    )


def decisions_of(entries: Iterable[Any]) -> list[Decision]:
    """As the core sends them."""
    return [msgspec.convert(entry, Decision) for entry in entries]


async def _pieces_of(engine: EngineCalls, part: str) -> list[dict[str, Any]]:
    """The last one is empty, or as long as what came while the others were read."""
    pieces: list[dict[str, Any]] = []
    since = 0
    end = None
    while end is None or since < end:
        piece = await engine.control("recording", {"part": part, "since": since})
        pieces.append(piece)
        # What is recorded meanwhile is left for the next reader: else a busy engine would never be through.
        end = piece["end"] if end is None else end
        since = piece["next"]
        if not piece["entries"]:
            break
    return pieces
