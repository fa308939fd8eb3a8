"""A core whose run is written down: what comes in, what it decides, and what others tell it (observability/run_log.py).

Stands around a core and between it and its executor and connector, so that a core that is not recorded knows nothing
of it. What was written is read again by simulation/replay.py. It decides nothing, and no time of it reaches the core.
"""

from __future__ import annotations

import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import msgspec

from quire.config import EngineConfig, KVConnectorConfig
from quire.engine_core.driver import Core
from quire.engine_core.engine_core import OF_WORKERS, EngineCore
from quire.engine_core.executor.executor import UNRECORDED, Executor, PendingStep
from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.launch import build_engine_core, make_executor
from quire.kv_connectors import make_scheduler_half
from quire.kv_connectors.connector import CacheLayout, Found, NamedBlocks, SchedulerHalf, Tokens
from quire.messages import (
    AbortRequests,
    CacheChanged,
    ControlCall,
    EngineOutputs,
    EngineRequest,
    ExtendRequest,
    KVTransfer,
    PermitTokens,
    SchedulerOutput,
    StepOutput,
    WorkerCapacity,
)
from quire.observability.redaction import RedactingSink, Redaction
from quire.observability.run_log import RecordSink, RunLogWriter, free_name, log_path
from quire.observability.run_records import (
    FORMAT,
    Answered,
    Closed,
    Decided,
    Died,
    Failed,
    Header,
    Measured,
    Ready,
    Received,
    Settled,
    StepFailed,
    Told,
)
from quire.version import __version__

Clock = Callable[[], float]
_PACKAGES = ("torch", "numpy", "transformers", "msgspec")


def build_core(config: EngineConfig) -> Core:
    """The core of a configuration; it is recorded if that says so."""
    if config.record is None:
        return build_engine_core(config)
    path = free_name(log_path(config.record, config.replica, config.data_parallel_size))
    log = RunLogWriter(path, config.record_bytes, time.monotonic)
    try:
        core = record_core(config, make_executor(config.worker), log, log.now, date=_today())
    except BaseException as error:
        # may quote pinned prefixes
        why = type(error).__name__ if config.record_redact else error
        log.write(Closed(at=log.now(), reason=f"the engine could not start: {why}"))
        log.close()
        raise
    core.ready.report.append(f"record: the run is written to {log.path}")
    core.at_end(log.close)
    return core


def record_core(
    config: EngineConfig,
    executor: Executor,
    sink: RecordSink,
    clock: Clock,
    date: str = "",
    *,
    make_manager: Callable[..., KVCacheManager] = KVCacheManager,
) -> RecordedCore:
    """The core of a configuration, written down from its start. `clock`: seconds since the log began."""
    if not config.prefix_hash_key:
        # the core would draw one, and nobody would know it again
        config = replace(config, prefix_hash_key=secrets.token_bytes(32))
    shown = config
    if config.record_redact:
        sink = RedactingSink(sink, Redaction(config.facts.vocab_size, secrets.token_bytes(32)))
        connector = None if config.kv_connector is None else replace(config.kv_connector, args={})
        shown = replace(
            config,
            prefix_hash_key=b"",
            chat_template=None,
            pinned_prefixes=None,
            # the address of a store may say a password
            kv_connector=connector,
            worker=replace(config.worker, kv_connector=connector),
        )
    sink.write(
        Header(
            at=clock(),
            format=FORMAT,
            version=__version__,
            date=date,
            config=shown,
            model=config.worker.model_as_run,
            machine=_machine(),
            is_redacted=config.record_redact,
        )
    )
    recorded = RecordingExecutor(executor, sink, clock)

    def make_half(asked: KVConnectorConfig | None, layout: CacheLayout) -> SchedulerHalf | NamedBlocks:
        half = make_scheduler_half(asked, layout)
        return half if asked is None else _recorded_half(half, sink, clock)

    core = build_engine_core(config, recorded, make_half=make_half, make_manager=make_manager)
    sink.write(Ready(at=clock(), ready=core.ready))
    return RecordedCore(core, executor, sink, clock)


class RecordedCore:
    """Passes on what its driver asks, and writes it down first."""

    def __init__(self, core: EngineCore, workers: Executor, sink: RecordSink, clock: Clock) -> None:
        self.core = core
        self.ready = core.ready
        self._workers = workers
        self._sink = sink
        self._clock = clock
        self._ends: list[Callable[[], None]] = []
        self.watch_steps = core.watch_steps
        self.watch_arrivals = core.watch_arrivals
        self.loss_descriptors = core.loss_descriptors
        self.tend = core.tend
        self.times = core.times

    def at_end(self, end: Callable[[], None]) -> None:
        """Called when the core has been shut down."""
        self._ends.append(end)

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def add(self, request: EngineRequest) -> None:
        self._sink.write(Received(at=self._clock(), message=request))
        self.core.add(request)

    def extend(self, extension: ExtendRequest) -> None:
        self._sink.write(Received(at=self._clock(), message=extension))
        self.core.extend(extension)

    def permit(self, permit: PermitTokens) -> None:
        self._sink.write(Received(at=self._clock(), message=permit))
        self.core.permit(permit)

    def abort(self, aborts: AbortRequests) -> None:
        self._sink.write(Received(at=self._clock(), message=aborts))
        self.core.abort(aborts)

    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None:
        self._sink.write(Failed(at=self._clock(), request_id=request_id, reason=reason, num_outputs=num_outputs))
        self.core.fail(request_id, reason, num_outputs)

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name.startswith(OF_WORKERS):
            # changes no decision, and the answer is for whoever asked
            return self._workers.control(name.removeprefix(OF_WORKERS), args)
        self._sink.write(Received(at=self._clock(), message=ControlCall(call_id=0, name=name, args=args)))
        return self.core.control(name, args)

    def step(self) -> EngineOutputs:
        try:
            outputs = self.core.step()
        except BaseException as error:
            self._sink.write(Died(at=self._clock(), kind=type(error).__name__, reason=str(error)))
            raise
        self._sink.write(Settled(at=self._clock()))
        return outputs

    def watch_cache(self, tell: Callable[[CacheChanged], None]) -> None:
        self.core.watch_cache(tell)

    def held_in_cache(self) -> CacheChanged | None:
        return self.core.held_in_cache()

    def check_workers(self) -> None:
        self.core.check_workers()

    def shutdown(self) -> None:
        self.core.shutdown()
        for end in self._ends:
            end()


class RecordingExecutor:
    """Passes on what the core asks, and writes the answers down."""

    def __init__(self, inner: Executor, sink: RecordSink, clock: Clock) -> None:
        self._inner = inner
        self._sink = sink
        self._clock = clock
        self.initialize_cache = inner.initialize_cache
        self.run_ahead = inner.run_ahead
        self.loss_descriptors = inner.loss_descriptors
        self.check_workers = inner.check_workers
        self.shutdown = inner.shutdown

    def measure_capacity(self) -> WorkerCapacity:
        capacity = self._inner.measure_capacity()
        self._sink.write(Measured(at=self._clock(), capacity=capacity))
        return capacity

    def execute(self, output: SchedulerOutput) -> PendingStep:
        # before it runs: what it may die of is in the log
        self._sink.write(Decided.of(output, self._clock()))
        try:
            pending = self._inner.execute(output)
        except BaseException as error:
            self._fail(error)
            raise
        return _RecordedStep(pending, self)

    def settle(self, pending: PendingStep) -> StepOutput:
        try:
            answer = pending.result()
        except BaseException as error:
            self._fail(error)
            raise
        # its columns may lie where the next step writes
        kept = msgspec.structs.replace(
            answer, rows=answer.rows.copy(), token_ids=answer.token_ids.copy(), speculated=answer.speculated.copy()
        )
        self._sink.write(Answered(at=self._clock(), answer=kept))
        return answer

    def _fail(self, error: BaseException) -> None:
        self._sink.write(StepFailed(at=self._clock(), kind=type(error).__name__, reason=str(error)))

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name in UNRECORDED:
            return self._inner.control(name, args)
        return _told(self._sink, self._clock, name, lambda: self._inner.control(name, args))


class _RecordedStep:
    def __init__(self, pending: PendingStep, executor: RecordingExecutor) -> None:
        self._pending = pending
        self._executor = executor

    def result(self) -> StepOutput:
        return self._executor.settle(self._pending)


def _told(sink: RecordSink, clock: Clock, question: str, ask: Callable[[], Any]) -> Any:
    try:
        answer = ask()
    except Exception as error:
        sink.write(Told(at=clock(), question=question, kind=type(error).__name__, reason=str(error)))
        raise
    sink.write(Told(at=clock(), question=question, answer=answer))
    return answer


# ---------------------------------------------------------------------------------------------- connectors


def _recorded_half(half: SchedulerHalf | NamedBlocks, sink: RecordSink, clock: Clock) -> SchedulerHalf | NamedBlocks:
    """What a store has, and when, is known outside alone."""

    def told(question: str, ask: Callable[[], Any]) -> Any:
        return _told(sink, clock, question, ask)

    knows_blocks = isinstance(half, NamedBlocks)
    told("connector", lambda: knows_blocks)
    return _RecordedBlocks(half, told) if isinstance(half, NamedBlocks) else _RecordedHalf(half, told)


_Tell = Callable[[str, Callable[[], Any]], Any]


class _RecordedHalf:
    def __init__(self, inner: SchedulerHalf, told: _Tell) -> None:
        self._told = told
        self._inner = inner
        self.load = inner.load
        self.statistics = inner.statistics

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        reason: str | None = self._told("refuse", lambda: self._inner.reason_to_refuse(transfer))
        return reason

    def find(self, key: str, token_ids: Tokens) -> Found | None:
        found = self._inner.find(key, token_ids)
        self._told("find", lambda: None if found is None else found.num_tokens)
        return found


class _RecordedBlocks(NamedBlocks):
    def __init__(self, inner: NamedBlocks, told: _Tell) -> None:
        self._inner = inner
        self._told = told

    def name_of(self, group: int, content: bytes) -> bytes:
        return self._inner.name_of(group, content)

    def set_price(self, seconds_per_block: float) -> None:
        self._inner.set_price(seconds_per_block)

    def ask(self, number: int, names: list[bytes], *, is_expected: bool) -> bool:
        is_worth_it: bool = self._told("ask", lambda: self._inner.ask(number, names, is_expected=is_expected))
        return is_worth_it

    def arrived(self) -> list[int]:
        numbers: list[int] = self._told("arrived", self._inner.arrived)
        return numbers

    def forget(self, number: int) -> None:
        self._inner.forget(number)

    def wait(self) -> None:
        self._inner.wait()

    def near(self, names: list[bytes]) -> Sequence[Any]:
        near = self._inner.near(names)
        self._told("num_near", lambda: len(near))
        return near

    def lend(self, near: Sequence[Any]) -> Any:
        return self._inner.lend(near)

    def wants(self, name: bytes) -> bool:
        is_wanted: bool = self._told("wants", lambda: self._inner.wants(name))
        return is_wanted

    def statistics(self) -> dict[str, float]:
        return self._inner.statistics()


# ---------------------------------------------------------------------------------------------- the header


def _today() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(), "processor": platform.processor()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
