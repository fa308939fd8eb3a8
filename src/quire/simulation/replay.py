"""A run that was recorded, once more: the shipped core, given the same in the same order (observability/run_log.py).

What others told the core (measurements, stores, workers) is told again from the log. Steps are computed by real workers
and compared, or answered from the log: then no weights are needed, and decisions alone are compared. The first
difference ends it.
"""

from __future__ import annotations

import builtins
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import quire.errors
from quire.config import BurstTimes, EngineConfig, KVConnectorConfig
from quire.engine_core.engine_core import OF_WORKERS, EngineCore
from quire.engine_core.executor.executor import UNRECORDED, Executor, PendingStep
from quire.engine_core.launch import build_engine_core
from quire.errors import OptionError
from quire.kv_connectors.connector import CacheLayout, Found, NamedBlocks, SchedulerHalf, Tokens
from quire.messages import (
    AbortRequests,
    ControlCall,
    EngineRequest,
    ExtendRequest,
    KVTransfer,
    PermitTokens,
    SchedulerOutput,
    StepOutput,
    ToCore,
    WorkerCapacity,
)
from quire.observability.recorder import DecisionRecorder
from quire.observability.run_log import RunLog
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
    RunRecord,
    Settled,
    StepFailed,
    Told,
)
from quire.simulation.differences import Difference, RowOwners, difference_of_answers, difference_of_decisions

R = TypeVar("R", bound=RunRecord)
_WAITS_FOR_ADAPTER_SECONDS = 600.0
_ANY_SECONDS = 3600.0


class _DifferenceError(Exception):
    """The run is not the recorded one any more. The replay knows in what."""


class _LogEndedError(Exception):
    """The log ends within a step."""


class RecordedInputs:
    """The records of a log, one after the other, and what is found wrong with them."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._records = iter(records)
        # read, and not taken yet
        self._ahead: deque[RunRecord] = deque()
        self.now = 0.0
        self.step = 0
        self.difference: Difference | None = None
        self.has_ended = False

    def peek(self) -> RunRecord | None:
        return next(self._following(), None)

    def _following(self) -> Iterator[RunRecord]:
        """Records that were not taken, and stay so."""
        yield from list(self._ahead)
        for record in self._records:
            self._ahead.append(record)
            yield record

    def num_tokens_in(self, step: int) -> int:
        """Tokens that each row got in a step, at most, which is about to be answered."""
        for record in self._following():
            if isinstance(record, Answered) and record.answer.step == step:
                return int(np.bincount(record.answer.rows).max(initial=1))
            if isinstance(record, (StepFailed, Died, Closed)):
                break
        return 1

    def take(self) -> RunRecord:
        record = self.peek()
        assert record is not None
        self._ahead.popleft()
        self.now = record.at
        return record

    def expect(self, kind: type[R], what: str) -> R:
        """The next record, where the replayed core does what is written in one of this kind."""
        record = self.peek()
        if record is None or isinstance(record, Closed):
            self.has_ended = True
            raise _LogEndedError
        if not isinstance(record, kind):
            self.differs(Difference(self.step, record.at, "what happens", words_of(record), what))
        self.take()
        return record  # type: ignore[return-value]

    def differs(self, difference: Difference) -> None:
        self.difference = self.difference or difference
        raise _DifferenceError


def words_of(record: RunRecord) -> str:
    match record:
        case Decided():
            return f"step {record.step} is decided"
        case Answered():
            return f"step {record.answer.step} is answered"
        case StepFailed() | Died():
            return f"it fails: {record.kind}: {record.reason}"
        case Told():
            return f"{record.question} is asked"
        case Settled():
            return "nothing more in this call of step"
        case Received():
            return f"a message comes in: {type(record.message).__name__}"
        case _:
            return type(record).__name__.lower()


@dataclass
class Replayed:
    """How it went."""

    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    # of the recorded run, up to where this one came
    seconds: float = 0.0
    difference: Difference | None = None
    # how the log ended
    ending: str = ""


class Replay:
    """One log and the core that follows it."""

    def __init__(
        self, log: RunLog, workers: Executor | None = None, *, keeps_decisions: bool = False, num_bytes: int = 2**34
    ) -> None:
        """`workers`: compute the steps; None: the log answers them. `keeps_decisions`: for life.py, at most so many
        bytes."""
        header = log.header
        if header.format != FORMAT:
            raise OptionError(
                f"{log.path}: was written in form {header.format}, this version reads {FORMAT}. "
                f"Replay it with Quire {header.version}."
            )
        if header.is_redacted and workers is not None:
            raise OptionError(f"{log.path}: its tokens were exchanged, so no model can follow it. Give --no-model.")
        self.log = log
        self.inputs = RecordedInputs(log)
        self._executor = ReplayingExecutor(self.inputs, workers)
        recorder = DecisionRecorder(num_bytes, self.now) if keeps_decisions else None
        config = config_of(header)

        def make_half(asked: KVConnectorConfig | None, layout: CacheLayout) -> SchedulerHalf | NamedBlocks:
            return half_of(self.inputs)

        halves: dict[str, Any] = {} if config.kv_connector is None else {"make_half": make_half}
        self.core: EngineCore | None = None
        try:
            self.core = build_engine_core(config, self._executor, recorder=recorder, **halves)
            self.inputs.expect(Ready, "the core stands")
        except (_LogEndedError, _DifferenceError):
            return

    def now(self) -> float:
        """Seconds since the log began."""
        return self.inputs.now

    def run(self, until: int | None = None) -> Replayed:
        """To the end of the log, or up to a step of that number."""
        replayed = Replayed()
        inputs = self.inputs
        while self.core is not None and inputs.difference is None and not inputs.has_ended:
            record = inputs.peek()
            if record is None or isinstance(record, Closed):
                break
            if until is not None and inputs.step >= until and isinstance(record, Decided):
                break
            match record:
                case Received():
                    inputs.take()
                    replayed.num_requests += isinstance(record.message, EngineRequest)
                    self._hand_over(self.core, record.message)
                case Failed():
                    inputs.take()
                    _quietly(self.core.fail, record.request_id, record.reason, record.num_outputs)
                case _:
                    self._step(self.core)
        replayed.num_steps = inputs.step
        replayed.num_tokens = self._executor.num_tokens
        replayed.seconds = inputs.now
        replayed.difference = inputs.difference
        replayed.ending = self.log.ending
        if self._executor.workers is not None:
            self._executor.workers.shutdown()
        return replayed

    def _hand_over(self, core: EngineCore, message: ToCore) -> None:
        """What the core could not take then it cannot take now; a record of the failure follows."""
        match message:
            case EngineRequest():
                _quietly(core.add, message)
            case ExtendRequest():
                _quietly(core.extend, message)
            case PermitTokens():
                _quietly(core.permit, message)
            case AbortRequests():
                _quietly(core.abort, message)
            case ControlCall():
                if message.name.startswith(OF_WORKERS):
                    raise OptionError(f"{message.name}: no log that was recorded holds such a call; this one was made.")
                _quietly(core.control, message.name, message.args)

    def _step(self, core: EngineCore) -> None:
        inputs = self.inputs
        try:
            core.step()
        except (_LogEndedError, _DifferenceError):
            return
        except Exception as error:
            record = inputs.peek()
            if isinstance(record, Died) and record.kind == type(error).__name__:
                inputs.take()
                inputs.has_ended = True
                return
            recorded = "the log ends" if record is None else words_of(record)
            replayed = f"it fails: {type(error).__name__}: {error}"
            inputs.difference = Difference(inputs.step, inputs.now, "what happens", recorded, replayed)
            return
        if inputs.difference is None and not inputs.has_ended:
            try:
                inputs.expect(Settled, "nothing more in this call of step")
            except (_LogEndedError, _DifferenceError):
                return


def _quietly(call: Callable[..., Any], *args: Any) -> None:
    try:
        call(*args)
    except Exception:
        return


def config_of(header: Header, model: str | None = None) -> EngineConfig:
    """What the core was built from, without what looks outside."""
    config = header.config
    worker = replace(config.worker, processors=None, model_path=model or config.worker.model_path)
    if worker.burst_times.most_tokens > 1:
        # so long that the log alone says how many tokens a step brings
        worker = replace(worker, burst_times=BurstTimes(_ANY_SECONDS, _ANY_SECONDS))
    return replace(config, worker=worker, record=None, kv_events=None, tells_cache_changes=False, recorder_bytes=0)


class ReplayingExecutor:
    """Tells the core what it was told, and has workers compute the same, if there are some."""

    def __init__(self, inputs: RecordedInputs, workers: Executor | None) -> None:
        self._inputs = inputs
        self.workers = workers
        self.num_tokens = 0
        self._owners = RowOwners()

    def measure_capacity(self) -> WorkerCapacity:
        if self.workers is not None:
            # they also prepare themselves in it
            self.workers.measure_capacity()
        return self._inputs.expect(Measured, "memory is measured").capacity

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        if self.workers is not None:
            self.workers.initialize_cache(groups, num_blocks, num_host_blocks)

    def run_ahead(self) -> None:
        if self.workers is not None:
            self.workers.run_ahead()

    def execute(self, output: SchedulerOutput) -> PendingStep:
        inputs = self._inputs
        recorded = inputs.expect(Decided, f"step {output.step} is decided")
        inputs.step = recorded.step
        found = difference_of_decisions(recorded, Decided.of(output, recorded.at), self._owners)
        if found is not None:
            inputs.differs(found)
        self._owners.follow(recorded)
        pending = None
        if self.workers is not None:
            # a clock decided it then
            output.most_tokens = min(output.most_tokens, inputs.num_tokens_in(output.step))
            pending = self.workers.execute(output)
        return _ReplayedStep(self, output.step, pending)

    def settle(self, step: int, pending: PendingStep | None) -> StepOutput:
        inputs = self._inputs
        if isinstance(record := inputs.peek(), StepFailed):
            inputs.take()
            raise error_of(record.kind, record.reason)
        recorded = inputs.expect(Answered, f"step {step} is answered")
        answer = recorded.answer
        self.num_tokens += len(answer.token_ids)
        self._owners.lose(answer)
        if pending is not None:
            found = difference_of_answers(recorded, pending.result(), self._owners)
            if found is not None:
                inputs.differs(found)
        return answer

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name in UNRECORDED:
            return {} if self.workers is None else self.workers.control(name, args)
        told = self._inputs.expect(Told, f"{name} is asked")
        if told.question != name:
            self._inputs.differs(Difference(self._inputs.step, told.at, "what is asked", told.question, name))
        if told.kind:
            raise error_of(told.kind, told.reason)
        if self.workers is not None and not name.startswith("measure_"):
            self._do(self.workers, name, args, told.answer)
        return told.answer

    def _do(self, workers: Executor, name: str, args: dict[str, Any], recorded: Any) -> None:
        answer = workers.control(name, args)
        if name != "adapter_state":
            return
        # loading goes on beside the steps, and here it must not be later than it was
        end = time.monotonic() + _WAITS_FOR_ADAPTER_SECONDS
        while recorded["state"] == "ready" and answer["state"] != "ready" and time.monotonic() < end:
            time.sleep(0.01)
            answer = workers.control(name, args)

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None:
        """Whoever was lost is in the log."""

    def shutdown(self) -> None:
        if self.workers is not None:
            self.workers.shutdown()


class _ReplayedStep:
    def __init__(self, executor: ReplayingExecutor, step: int, pending: PendingStep | None) -> None:
        self._executor = executor
        self._step = step
        self._pending = pending

    def result(self) -> StepOutput:
        return self._executor.settle(self._step, self._pending)


def error_of(kind: str, reason: str) -> Exception:
    """As near to what was raised as can be had."""
    known: Any = getattr(quire.errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            error: Exception = known(reason)
        except TypeError:
            return RuntimeError(reason)
        return error
    named: type[Exception] = type(kind, (Exception,), {})
    return named(reason)


# ---------------------------------------------------------------------------------------------- connectors


def half_of(inputs: RecordedInputs) -> SchedulerHalf | NamedBlocks:
    """What a connector said is said again; nothing is moved."""
    knows_blocks = inputs.expect(Told, "a connector is asked").answer
    return _ReplayedBlocks(inputs) if knows_blocks else _ReplayedHalf(inputs)


@dataclass(frozen=True)
class _Found:
    num_tokens: int


def _answer(inputs: RecordedInputs, question: str) -> Any:
    told = inputs.expect(Told, f"{question} is asked")
    if told.question != question:
        inputs.differs(Difference(inputs.step, told.at, "what is asked", told.question, question))
    if told.kind:
        raise error_of(told.kind, told.reason)
    return told.answer


class _ReplayedHalf:
    def __init__(self, inputs: RecordedInputs) -> None:
        self._inputs = inputs

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        reason: str | None = _answer(self._inputs, "refuse")
        return reason

    def find(self, key: str, token_ids: Tokens) -> Found | None:
        num_tokens = _answer(self._inputs, "find")
        return None if num_tokens is None else _Found(num_tokens)

    def load(self, found: Found) -> Any:
        return None

    def statistics(self) -> dict[str, float]:
        return {}


class _ReplayedBlocks(NamedBlocks):
    def __init__(self, inputs: RecordedInputs) -> None:
        self._inputs = inputs

    def name_of(self, group: int, content: bytes) -> bytes:
        return b"%d " % group + content

    def set_price(self, seconds_per_block: float) -> None: ...

    def ask(self, number: int, names: list[bytes], *, is_expected: bool) -> bool:
        return bool(_answer(self._inputs, "ask"))

    def arrived(self) -> list[int]:
        return list(_answer(self._inputs, "arrived"))

    def forget(self, number: int) -> None: ...

    def wait(self) -> None: ...

    def near(self, names: list[bytes]) -> Sequence[Any]:
        return range(_answer(self._inputs, "num_near"))

    def lend(self, near: Sequence[Any]) -> Any:
        return None

    def wants(self, name: bytes) -> bool:
        return bool(_answer(self._inputs, "wants"))

    def statistics(self) -> dict[str, float]:
        return {}


# ---------------------------------------------------------------------------------------------- two logs


def compare_logs(first: Path, second: Path, until: int | None = None) -> Replayed:
    """Of two runs, the first step in which they part: what came in, was decided, or was answered."""
    owners = RowOwners()
    outcome = Replayed()
    logs = RunLog(first), RunLog(second)
    for one, other in _steps_of_both(*logs):
        if until is not None and outcome.num_steps >= until and isinstance(one, Decided):
            break
        outcome.difference = _difference(one, other, outcome, owners)
        if outcome.difference is not None:
            return outcome
        if isinstance(one, Decided):
            outcome.num_steps = one.step
            owners.follow(one)
        elif isinstance(one, Answered):
            outcome.num_tokens += len(one.answer.token_ids)
        elif isinstance(one, Received):
            outcome.num_requests += isinstance(one.message, EngineRequest)
        if one is not None:
            outcome.seconds = one.at
    outcome.ending = logs[0].ending
    return outcome


def _steps_of_both(first: RunLog, second: RunLog) -> Iterator[tuple[RunRecord | None, RunRecord | None]]:
    told = (Received, Failed, Decided, Answered, StepFailed, Died)
    both = tuple(filter(lambda record: isinstance(record, told), log) for log in (first, second))
    while True:
        one = next(both[0], None)
        other = next(both[1], None)
        # a log that is cut off says nothing of what came later
        if one is None or other is None:
            return
        yield one, other


def _difference(
    one: RunRecord | None, other: RunRecord | None, outcome: Replayed, owners: RowOwners
) -> Difference | None:
    if isinstance(one, Decided) and isinstance(other, Decided):
        return difference_of_decisions(one, other, owners)
    if isinstance(one, Answered) and isinstance(other, Answered):
        return difference_of_answers(one, other.answer, owners)
    at = 0.0 if one is None else one.at
    step = outcome.num_steps
    if isinstance(one, Received) and isinstance(other, Received):
        is_same = one.message == other.message
        return None if is_same else Difference(step, at, "what comes in", str(one.message), str(other.message))
    if type(one) is type(other):
        return None
    shown = [words_of(record) if record is not None else "nothing" for record in (one, other)]
    return Difference(step, at, "what happens", shown[0], shown[1])
