"""Servers whose ranks Ray places, in a test's cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support.server_process import ServerProcess

PROMPTS = [[3, 4, 5], list(range(20, 50)), [7] * 12]
_SLOW_STEPS = "in_forward:slow:1:0:seconds=0.1"


@contextmanager
def serving(checkpoint: Path, size: str, fault: str = _SLOW_STEPS) -> Iterator[ServerProcess]:
    """Two ranks, each with all processors of a machine; `size`: the flag that says so."""
    command = [
        "-m", "quire", "serve", str(checkpoint), "--port", "0", size, "2", "--distributed-executor-backend", "ray",
        "--host-ip", "127.0.0.1", "--num-threads", "2", "--kv-cache-memory-bytes", str(16 << 20), "--device", "cpu",
    ]  # fmt: skip
    with ServerProcess(command, {"QUIRE_FAIL": fault}) as server:
        yield server


def far_ranks() -> list[int]:
    """Processes of ranks that a keeper has started."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("rank_process" in word for word in process.info["cmdline"] or [])
        and any("ray::" in parent.name() or "ray::" in " ".join(parent.cmdline()) for parent in process.parents())
    ]


def concerned_by(server: ServerProcess) -> list[int]:
    """The server's own processes, the ranks on other machines and their keepers."""
    own = psutil.Process(server.pid)
    far = [psutil.Process(pid) for pid in far_ranks()]
    keepers = [parent for process in far for parent in process.parents()[:1]]
    return [process.pid for process in (own, *own.children(recursive=True), *far, *keepers)]
