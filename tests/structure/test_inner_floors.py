"""The floors inside the largest rooms, the gateway, the server and the engine core: their parts import downwards only.

A part is a folder or a file that stands directly in the room. Imports inside functions count as well: what is imported
late to keep a start quick is used all the same.
"""

from pathlib import Path

import pytest
from tests.structure.test_imports import SOURCE, Import, imports_of

# From the top down; parts on one floor do not import each other.
FLOORS = {
    "quire.interfaces.gateway": (
        ("run",),
        ("processes",),
        ("app",),
        ("services",),
        ("batches",),
        ("files", "responses", "sessions"),
        ("access", "storage", "welcome"),
    ),
    "quire.interfaces.server": (
        ("http_server",),
        ("app",),
        ("parts",),
        ("administration",),
        ("anthropic_messages", "cohere", "llama_cpp", "observing", "ollama", "openai_responses", "openapi"),
        ("openai", "transport"),
        ("endpoint", "form", "gate"),
        ("request_body",),
        ("event_stream", "process_role", "services"),
        ("access", "life", "page"),
        ("served_model", "serving"),
        ("further_models",),
        ("options", "restart_policy", "wire"),
    ),
    "quire.engine_core": (
        ("recorded_core",),
        ("launch",),
        ("engine_core",),
        ("cache_feed", "idle_memory", "observation", "weights"),
        ("process", "scheduler"),
        ("decoding", "kv_cache_manager", "launch_document"),
        ("further_clients", "pulse", "request"),
        ("block_table", "driver", "executor", "kv_event_publisher", "rows", "unread_frames"),
        ("step_observer", "whole_ranges"),
    ),
}


def part_of(room: str, module: str) -> str:
    """ "" is the room itself, which may import all of its parts."""
    return module.removeprefix(room).removeprefix(".").partition(".")[0]


def arrows_inside(room: str, imports: list[Import]) -> list[tuple[str, str, Import]]:
    inside = [one for one in imports if _is_in(room, one.importer) and _is_in(room, one.imported)]
    parts = [(part_of(room, one.importer), part_of(room, one.imported), one) for one in inside]
    return [(importer, imported, one) for importer, imported, one in parts if importer and importer != imported]


def _is_in(room: str, module: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def why_wrong(floor: dict[str, int], importer: str, imported: str) -> str | None:
    unplaced = [part for part in (importer, imported) if part not in floor]
    if unplaced:
        return f"{unplaced[0] or 'the room itself'} stands on no floor"
    return None if floor[importer] < floor[imported] else f"the arrow from {importer} to {imported} does not point down"


@pytest.mark.parametrize("room", FLOORS)
def test_parts_import_downwards(room: str):
    floor = {part: number for number, parts in enumerate(FLOORS[room]) for part in parts}
    reasons = [
        (why_wrong(floor, importer, imported), one)
        for importer, imported, one in arrows_inside(room, imports_of(SOURCE))
    ]
    wrong = [f"{one}: {reason}" for reason, one in reasons if reason]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", FLOORS)
def test_every_part_has_its_floor(room: str):
    folder = SOURCE.joinpath(*room.split(".")[1:])
    parts = {path.stem for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}
    assert sorted(parts) == sorted(part for parts in FLOORS[room] for part in parts)


def test_an_arrow_that_points_up_is_found(tmp_path: Path):
    room = tmp_path / "quire" / "engine_core"
    room.mkdir(parents=True)
    (room / "rows.py").write_text("def late():\n    from quire.engine_core import request\n")
    (room / "request.py").write_text("from quire.engine_core.rows import Rows\n")
    floor = {"request": 0, "rows": 1}
    arrows = arrows_inside("quire.engine_core", imports_of(tmp_path / "quire"))
    wrong = [why_wrong(floor, importer, imported) for importer, imported, _ in arrows]
    assert sorted(map(str, wrong)) == ["None", "the arrow from rows to request does not point down"]
