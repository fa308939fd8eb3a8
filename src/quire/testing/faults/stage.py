"""Where a fault is played: a server in a process of its own, live streams on it, a private folder for all that it may
leave behind, and what a case needs to look at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from quire.testing.faults.history import FINISHED, History
from quire.testing.faults.streams import PROMPTS, LiveStreams
from quire.testing.server_process import ServerProcess

_LOOK_SECONDS = 0.01
# errors of a fault may still be on their way when the server is ready again
_AFTER_A_FAULT = 0.5


@dataclass(frozen=True)
class Setting:
    """How the cases are played."""

    num_streams: int = 32
    # a core without a model instead of the embedded model
    is_paced: bool = False
    stall_timeout: float = 10.0
    # how many requests a storm has
    num_aborts: int = 1000


class FaultedServer(ServerProcess):
    """`quire serve`, with a folder of its own for everything."""

    def __init__(self, setting: Setting, folder: Path, *options: str, core: str = "build", **environment: str) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        for name in ("tmp", "cache"):
            (folder / name).mkdir(exist_ok=True)
        module = "quire.testing.faults.paced_core" if setting.is_paced or core != "build" else "quire.interfaces.cli"
        command = ["-m", module, "serve", "--crash-reports", str(self.reports), "--port", "0"]
        command += ["--stall-timeout", str(setting.stall_timeout), *options]
        folders = {"TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
        super().__init__(command, {**folders, "PACED_CORE": core, **environment})

    def engine_pid(self) -> int:
        """Of the process that has the core, and the worker in it."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if any("engine_core.process" in word for word in child.cmdline()):
                    return child.pid
        raise AssertionError("there is no engine's process")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def left_behind(self) -> list[str]:
        """Files that a server which has ended left in its temporary folder."""
        return left_in(self.folder / "tmp")


def left_in(folder: Path) -> list[str]:
    """Without the folder that torch makes for its own later use, empty, when it is imported."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as name:
        yield Path(name)


@contextlib.asynccontextmanager
async def under_streams(
    setting: Setting, *options: str, **more: str
) -> AsyncIterator[tuple[FaultedServer, LiveStreams]]:
    """A server that answers `num_streams` streams. At the end of the block they are let finish and checked."""
    with private_folder() as folder, FaultedServer(setting, folder, *options, **more) as server:
        url = await asyncio.to_thread(server.wait_ready)
        history = History()
        async with LiveStreams(url, setting.num_streams, history) as streams:
            await streams.wait_live((setting.num_streams * 3 + 3) // 4)
            yield server, streams
        mistakes = history.mistakes()
        assert not mistakes, f"{len(mistakes)} of {len(history.records)} requests: {mistakes[:3]}"


@contextlib.contextmanager
def fault_on(streams: LiveStreams) -> Iterator[None]:
    """While it is on, errors are allowed."""
    began = time.monotonic()
    streams.history.faults.append((began, float("inf")))
    try:
        yield
    finally:
        streams.history.faults[-1] = (began, time.monotonic() + _AFTER_A_FAULT)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """How long it took to become true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not become true"
        await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


async def until_ready(streams: LiveStreams, wanted: bool, seconds: float = 120.0) -> float:
    """How long until /health/ready says so. /health/live says 200 all the time, and neither takes long."""
    began = time.monotonic()
    while await streams.is_ready() is not wanted:
        assert (await streams.get("/health/live")).status_code == 200
        assert time.monotonic() - began < seconds, f"ready is not {wanted} after {seconds} s"
        await asyncio.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


async def loses_its_engine(server: FaultedServer, streams: LiveStreams, number: signal.Signals) -> dict[str, float]:
    """Sends the engine a signal that ends or stops it, and waits until the server answers rightly again."""
    with fault_on(streams):
        os.kill(server.engine_pid(), number)
        began = time.monotonic()
        noticed = await until_ready(streams, False)
        await until_ready(streams, True)
        ready_again = time.monotonic() - began
        record = await streams.ask(PROMPTS[0])
    assert record.end == FINISHED, record
    return {"noticed": noticed, "ready_again": ready_again}


async def until_gone(processes: list[psutil.Process], seconds: float = 30.0) -> float:
    """How long until none of them runs any more."""
    return await until(lambda: not any(_runs(process) for process in processes), seconds)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
