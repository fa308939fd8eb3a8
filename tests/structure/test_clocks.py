"""Whoever waits, judges or gives up goes by the monotonic clock: one that is set must end nobody's time (F16)."""

import ast
import re
from pathlib import Path

import pytest

import quire

SOURCE = Path(quire.__file__).parent
# Files that read the wall clock, and what for: each only tells a time, or counts days.
TELLS_A_TIME = {
    "renderer/chat_template.py": "the date in a prompt",
    "renderer/template_sandbox.py": "the date in a prompt",
    "observability/otel.py": "when a span was",
    "interfaces/cli/bench_numbers.py": "the date of a measurement",
    "interfaces/server/life/crash_reports.py": "when an engine died",
    "interfaces/server/openai/chat_answer.py": "created",
    "interfaces/server/openai/continuations.py": "created",
    "interfaces/server/openai/pooling_work.py": "created",
    "interfaces/server/openai/embeddings.py": "created",
    "interfaces/server/ollama/answer.py": "created_at",
    "interfaces/server/openai_responses/answer.py": "completed_at",
    "interfaces/server/openai_responses/making.py": "created_at",
    "interfaces/gateway/sessions/registry.py": "created_at",
    "interfaces/server/served_model.py": "created",
    "engine_core/kv_event_publisher.py": "when a block was stored",
    "kv_connectors/tiered/stores/files.py": "when a file was read last, as file systems keep it",
    "interfaces/gateway/storage/storage.py": "created_at, and days after which what is stored goes",
}
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def reads_the_wall_clock(source: str) -> bool:
    if not re.search(r"\btime\.time|from time import|\.(now|utcnow|today)\b", source):
        return False  # most files need not be parsed
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if {"time", "time_ns"} & {name.name for name in node.names}:
                return True
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (of, node.attr) in WALL:
                return True
    return False


def test_only_those_that_tell_a_time_read_the_wall_clock():
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "testing" not in file.relative_to(SOURCE).parts and reads_the_wall_clock(file.read_text(encoding="utf-8"))
    }
    assert found - set(TELLS_A_TIME) == set(), "these wait or judge by a clock that can be set"
    assert set(TELLS_A_TIME) - found == set(), "these no longer read it"


@pytest.mark.parametrize(
    "source", ["import time\ntime.time()", "from time import time", "import datetime\ndatetime.datetime.now()"]
)
def test_it_is_seen(source):
    assert reads_the_wall_clock(source)
    assert not reads_the_wall_clock("import time\ntime.monotonic()")
