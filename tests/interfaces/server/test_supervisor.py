"""The supervisor on an engine that a test plays; time is handed in where it decides."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine_client.replica_link import Loss
from quire.engine_core.pulse import Pulse
from quire.errors import EngineDeadError
from quire.interfaces.server.life.crash_reports import MOST_REPORTS, CrashReports
from quire.interfaces.server.life.supervisor import Supervisor
from quire.interfaces.server.restart_policy import RestartPolicy
from quire.messages import EngineReady
from quire.observability.metrics import ServerMetrics
from quire.testing.fake_llm import fake_config


def test_restarts_come_later_and_later_and_end():
    policy = RestartPolicy(3, 60.0)
    assert [policy.pause(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.5, 1.5, None]
    assert RestartPolicy(0, 60.0).pause(0.0) is None


def test_the_pause_does_not_grow_for_ever():
    policy = RestartPolicy(10_000, 1e9)
    assert max(policy.pause(float(now)) or 0.0 for now in range(2000)) < 60.0


def test_old_restarts_are_forgotten():
    policy = RestartPolicy(2, 60.0)
    assert [policy.pause(now) for now in (0.0, 50.0, 61.0, 62.0, 110.0)] == [0.0, 0.5, 0.5, None, 0.5]


class PlayedProcess:
    def __init__(self) -> None:
        self.pid = 4711
        self.num_sent = 0
        self.is_stopped = False
        self.processor_seconds = 1.0
        self.num_done = 0
        self.was_asked = False

    def pulse(self) -> Pulse:
        return Pulse(is_serving=True, is_busy=True, num_done=self.num_done)

    def last_steps(self) -> list[dict[str, int]]:
        return [{"step": 17, "num_tokens": 4}]

    def stacks(self) -> str:
        # they may be long, and others are answered meanwhile
        assert threading.current_thread() is not threading.main_thread()
        return "stacks of a crash"

    def ask_for_stacks(self) -> str:
        self.was_asked = True
        return "stacks that were asked for"

    def kill(self) -> None: ...


class PlayedEngine:
    """Dies when it is told to; starts again unless `failures` says why not."""

    def __init__(self) -> None:
        self.config = fake_config()
        self.ready = EngineReady(max_model_len=1, max_num_seqs=1, num_blocks=1, block_size=1)
        self.dead_reason: str | None = None
        self.processes: tuple[PlayedProcess, ...] = ()
        self.losses: list[Loss] = []
        self.is_running = True
        self.failures: list[str | OSError] = []
        self.log: list[str] = []

    def kill(self, reason: str) -> None:
        self.log.append("killed")
        self.dead_reason = reason

    def take_losses(self) -> list[Loss]:
        losses = self.losses
        self.losses = []
        return losses

    async def restart_replica(self, number: int) -> None:
        self.log.append(f"replica {number}")
        if self.failures:
            raise EngineDeadError(str(self.failures.pop(0)))

    async def restart(self, reason: str = "") -> EngineReady:
        self.log.append("restart")
        self.dead_reason = None
        if self.failures:
            failure = self.failures.pop(0)
            raise EngineDeadError(failure) if isinstance(failure, str) else failure
        return self.ready


class Stage:
    def __init__(self, folder: Path | None, *, most: int = 3, stall_timeout: float = 0.2) -> None:
        self.engine = PlayedEngine()
        self.metrics = ServerMetrics()
        self.supervisor = Supervisor(
            self.engine,
            RestartPolicy(most, 60.0),
            CrashReports(folder),
            self.metrics,
            stall_timeout=stall_timeout,
            on_standing=self.on_standing,
        )
        self.is_ready = asyncio.Event()

    def on_standing(self, is_standing: bool) -> None:
        self.engine.log.append("stands" if is_standing else "goes on")

    def on_lost(self) -> None:
        self.engine.log.append("lost")

    def on_ready(self) -> None:
        self.engine.log.append("ready")
        self.is_ready.set()

    def run(self) -> asyncio.Task[str]:
        return asyncio.create_task(self.supervisor.run(self.on_lost, self.on_ready))


@pytest.fixture
def play():
    return lambda test: asyncio.run(asyncio.wait_for(test, 30))


def reports_in(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def test_a_dead_engine_is_replaced(play, tmp_path):
    async def test():
        stage = Stage(tmp_path / "reports")
        running = stage.run()
        stage.engine.processes = (PlayedProcess(),)
        stage.engine.dead_reason = "signal SIGKILL"
        await stage.is_ready.wait()
        assert stage.engine.log == ["lost", "restart", "ready"]
        assert stage.metrics.engine_restarts.value() == stage.metrics.engine_deaths.value("death") == 1
        running.cancel()

    play(test())
    [report] = reports_in(tmp_path / "reports")
    assert report["cause"] == "signal SIGKILL"
    assert report["stacks"] == ["stacks of a crash"]
    assert report["pulse"]["is_serving"]
    assert report["last_steps"] == [{"step": 17, "num_tokens": 4}]
    assert report["configuration"]["max_model_len"] > 0
    assert {"quire", "python", "torch"} <= set(report["versions"])


def test_starts_that_fail_count_and_the_last_cause_is_told(play, tmp_path):
    async def test():
        stage = Stage(None, most=2)
        stage.engine.failures = ["no memory", "no memory again"]
        stage.engine.dead_reason = "it crashed"
        assert await stage.run() == "no memory again"
        assert stage.engine.log == ["lost", "restart", "restart"]
        assert stage.metrics.engine_restarts.value() == 2

    play(test())


def test_a_machine_that_has_no_process_to_spare_is_asked_again(play):
    async def test():
        stage = Stage(None)
        stage.engine.failures = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
        running = stage.run()
        stage.engine.dead_reason = "it crashed"
        await stage.is_ready.wait()
        assert stage.engine.log == ["lost", "restart", "restart", "ready"]
        running.cancel()

    play(test())


def test_no_restart_if_none_is_wanted(play):
    async def test():
        stage = Stage(None, most=0)
        stage.engine.dead_reason = "it crashed"
        assert await stage.run() == "it crashed"
        assert stage.engine.log == ["lost"]

    play(test())


def test_a_stalled_engine_says_what_it_does_and_is_killed(play, tmp_path):
    async def test():
        stage = Stage(tmp_path)
        running, watching = stage.run(), asyncio.create_task(stage.supervisor.watch())
        process = PlayedProcess()
        stage.engine.processes = (process,)
        await stage.is_ready.wait()
        assert process.was_asked
        assert stage.engine.log[:4] == ["killed", "lost", "restart", "ready"]
        assert stage.metrics.engine_stalls.value() >= 1
        assert stage.metrics.engine_deaths.value("stall") >= 1
        running.cancel()
        watching.cancel()

    play(test())
    report = reports_in(tmp_path)[0]
    assert report["kind"] == "stall"
    assert "no progress for" in report["cause"]
    assert report["stacks"] == ["stacks that were asked for"]


def test_an_engine_that_stands_still_and_goes_on_is_told_of_and_not_ended(play):
    async def test():
        stage = Stage(None, stall_timeout=60.0)
        watching = asyncio.create_task(stage.supervisor.watch())
        process, other = PlayedProcess(), PlayedProcess()
        stage.engine.processes = (process, other)
        while process.num_done < 40:  # the other one stands still meanwhile
            process.num_done += 1
            await asyncio.sleep(0.05)
        assert stage.engine.log == []
        while stage.engine.log != ["stands"]:
            await asyncio.sleep(0.05)
        other.num_done += 1
        while stage.engine.log != ["stands", "goes on"]:
            await asyncio.sleep(0.05)
        watching.cancel()

    play(test())


def test_a_replica_that_was_lost_before_all_were_started_again_is_not_replaced(play):
    async def test():
        stage = Stage(None, most=9)
        running, tending = stage.run(), asyncio.create_task(stage.supervisor.tend_replicas())
        stage.engine.losses = [Loss(0, "it crashed", None)]
        await _until(lambda: "replica 0" in stage.engine.log)
        # the last one dies as well: all are started again, and the other replica would wait longer for its turn
        stage.engine.dead_reason = "it crashed as well"
        await _until(lambda: "lost" in stage.engine.log)
        stage.engine.losses = [Loss(1, "it crashed", None)]
        await stage.is_ready.wait()
        assert not stage.engine.losses
        await asyncio.sleep(1.5)
        assert "replica 1" not in stage.engine.log
        stage.engine.losses = [Loss(1, "it crashed again", None)]
        await _until(lambda: "replica 1" in stage.engine.log)
        running.cancel()
        tending.cancel()

    play(test())


async def _until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_reports_are_private_and_few(tmp_path):
    folder = tmp_path / "reports"
    reports = CrashReports(folder)
    files = [reports.write(f"death {number}", "", fake_config(), {}) for number in range(MOST_REPORTS + 5)]
    assert all(file is not None for file in files)
    assert folder.stat().st_mode & 0o777 == 0o700
    left = list(folder.iterdir())
    assert len(left) == MOST_REPORTS
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in left)
    assert "death 24" in {report["cause"] for report in reports_in(folder)}


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert CrashReports(tmp_path / "file").write("x", "", fake_config(), {}) is None
    assert CrashReports(None).write("x", "", fake_config(), {}) is None
    assert os.listdir(tmp_path) == ["file"]
