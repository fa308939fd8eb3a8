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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
from tests.support.faults.history import FINISHED, History
from tests.support.faults.streams import PROMPTS, LiveStreams
from tests.support.server_process import ServerProcess
from tests.support.shared_memory import shared_files

_LOOK_SECONDS = 0.01
# a look that the server has to answer
_ASK_SECONDS = 0.03
_LAST_LINES = 8
# as `python -m` does with the name behind it
_RUN_MODULE = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
# errors of a fault may still be on their way when the server is ready again
_AFTER_A_FAULT = 0.5
# so that repetitions do not use up the restarts of a minute
OFTEN = ("--engine-restart-window", "0.1")


@dataclass(frozen=True)
class Setting:
    """How the cases are played. The numbers are those that `make faults` takes."""

    num_streams: int = 32
    # a core without a model instead of the embedded model, in cases that need none
    is_paced: bool = False
    stall_timeout: float = 10.0
    # faults of one kind on one server, one after the other
    num_rounds: int = 20
    # operations of a forward pass that find no memory, each once
    num_operations: int = 50
    # times that a client leaves in each way
    num_leaves: int = 100
    # how many requests a storm has
    num_aborts: int = 10_000
    # clients that read a byte a second, as many that read nothing, and how long
    num_slow_readers: int = 100
    slow_seconds: float = 600.0
    # connections whose other end falls silent
    num_half_open: int = 50
    # frames of garbage in each direction
    num_frames: int = 1000
    # hostile requests in all, the first one's seed, and bombs of each kind in a model's files
    num_hostile: int = 10_000
    seed: int = 1
    num_bombs: int = 40
    # what the clients of the server heard, for the verdict of the checker
    histories: list[History] = field(default_factory=list)
    # By core: asked of the first server, and the same of every later one.
    right_answers: dict[bool, dict[str, str]] = field(default_factory=lambda: {True: {}, False: {}})

    def history(self, *, may_break: bool = False) -> History:
        """Of the clients of one server; `may_break`: the server itself is ended."""
        self.histories.append(History(self.right_answers[self.is_paced], may_break=may_break))
        return self.histories[-1]

    @classmethod
    def small(cls) -> Setting:
        """Everything a few times: to see that it works."""
        return cls(8, stall_timeout=2.0, num_rounds=3, num_operations=5, num_leaves=2, num_aborts=200,
                   num_slow_readers=16, slow_seconds=5.0, num_half_open=3, num_frames=200,
                   num_hostile=400, num_bombs=3)  # fmt: skip


class FaultedServer(ServerProcess):
    """`quire serve`, with a folder of its own for all that it may leave behind."""

    def __init__(
        self, setting: Setting, folder: Path, *options: str, core: str = "build", prelude: str = "", **environment: str
    ) -> None:
        """`core`: one of builders.py; `prelude`: Python that its process runs first."""
        self.folder = folder
        self.reports = folder / "reports"
        (folder / "tmp").mkdir(exist_ok=True)
        self._shared_before = shared_files()
        module = "tests.support.faults.paced_core" if setting.is_paced or core != "build" else "quire.interfaces.cli"
        command = ["-c", f"{prelude}\n{_RUN_MODULE}", module] if prelude else ["-m", module]
        command += ["serve", "--crash-reports", str(self.reports), "--port", "0"]
        command += ["--stall-timeout", str(setting.stall_timeout), *options]
        # The cache is the user's: in an empty one each server would compile its kernels first, for a minute.
        super().__init__(command, {"TMPDIR": str(folder / "tmp"), "PACED_CORE": core, **environment})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is not None:
            lines = [line for line in self.output.splitlines() if "quire.server.access" not in line]
            error.add_note("The server's last words: " + " | ".join(lines[-_LAST_LINES:]))

    def engine_pid(self) -> int:
        """Of the process that has the core, and the worker in it."""
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                if any("engine_core.process" in word for word in child.cmdline()):
                    return child.pid
        raise AssertionError("there is no engine's process")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def names_of_descendants(self) -> list[str]:
        names = []
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return names

    def left_behind(self) -> list[str]:
        """Files that a server which has ended left in its temporary folder, and in /dev/shm."""
        return [*left_in(self.folder / "tmp"), *sorted(shared_files() - self._shared_before)]


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
        history = setting.history()
        async with LiveStreams(url, setting.num_streams, history) as streams:
            await streams.wait_live((setting.num_streams * 3 + 3) // 4)
            yield server, streams
        check(history)


def check(history: History) -> None:
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
        await asyncio.sleep(_ASK_SECONDS)
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
    return {"noticed": noticed, "ready again": ready_again}


async def until_gone(processes: list[psutil.Process], seconds: float = 30.0) -> float:
    """How long until none of them runs any more."""
    return await until(lambda: not any(_runs(process) for process in processes), seconds)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
