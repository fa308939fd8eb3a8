"""The engine core (4.1.2): a state machine that is driven by calls and answers with messages.

Owns the scheduler and the executor. It has no thread, no socket, no clock and no randomness: the same calls give the
same outputs. Driven by a CoreDriver (driver.py), in process.py or in a thread of its client; simulations drive it
themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine_core.cache_feed import CacheFeed
from quire.engine_core.executor.executor import STEP_TIMES, WATCH_ARRIVALS, Executor, PendingStep
from quire.engine_core.idle_memory import IdleMemory, NoIdleMemory
from quire.engine_core.observation import Observation
from quire.engine_core.scheduler.leap import Join, Room
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.engine_core.step_observer import StepObserver, StepObservers, TimedSteps, WatchedDecisions
from quire.engine_core.weights import Weights
from quire.errors import UserError, suggestion
from quire.failpoints import failpoint
from quire.messages import (
    NO_INTS,
    AbortRequests,
    CacheChanged,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    IntArray,
    PermitTokens,
    SchedulerOutput,
)
from quire.observability.step_times import NoStepTimes

ControlOperation = Callable[..., Any]
# how the names of calls begin that are passed to every worker
OF_WORKERS = "worker."


class EngineCore:
    """schedule, execute, update; with a depth of 1, the next step before the results of the last, and so on."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        ready: EngineReady,
        *,
        depth: int = 0,
        check_invariants: bool = False,
        feed: CacheFeed | None = None,
        memory: IdleMemory | NoIdleMemory | None = None,
        times: NoStepTimes | None = None,
    ) -> None:
        """`memory`: of the cache, where what is idle can be given back. `times`: of steps, if somebody counts them."""
        self.scheduler = scheduler
        self.executor = executor
        self.ready = ready
        # 4.6.1: steps that run while the next one is decided. With more than one, no row may be in two of them: who
        # gave way would go on without knowing its last token.
        self._depth = depth
        self._in_flight: deque[PendingStep] = deque()
        self._check_invariants = check_invariants
        self._feed = feed
        self._memory = memory or NoIdleMemory()
        # for whoever drives it, and has parts of its own to count
        self.times = NoStepTimes()
        self._observers = StepObservers(scheduler.prerequisites.kinds)
        if feed is not None:
            self._observe(feed)
        if times is not None:
            self.count_times(times)
        # nothing to do until the next message, because the last schedule granted nothing
        self._is_idle = True
        kept = scheduler.manager.kept
        self._weights = Weights(scheduler, executor.control)
        self._operations: dict[str, ControlOperation] = {
            "statistics": self.statistics,
            "reset_prefix_cache": self._reset_prefix_cache,
            "memory": scheduler.memory,
            "list_kept": lambda: [one.report() for one in kept],
            "fork_kept": kept.fork,
            "rewind_kept": kept.rewind,
            "release_kept": kept.release,
            "pin_kept": scheduler.pin,
            "check_invariants": self._checked,
            **self._weights.operations(),
            **Observation(scheduler).operations(),
            **scheduler.prerequisites.operations(),
        }

    # ------------------------------------------------------------------------------------------ messages in

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add_request(request)
        self._is_idle = False

    def extend(self, message: ExtendRequest) -> None:
        self.scheduler.extend(message.request_id, message.token_ids, message.is_final)
        self._is_idle = False

    def permit(self, message: PermitTokens) -> None:
        self.scheduler.permit(message)
        self._is_idle = False

    def abort(self, message: AbortRequests) -> None:
        self.scheduler.abort(message.request_ids, message.sequence_ids)
        self._is_idle = False

    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None:
        """A request that cannot go on ends alone; one that is not known yet has so many outputs. Raises if the core
        contradicts itself: then more is broken than this request."""
        self.scheduler.fail(request_id, reason, num_outputs)
        self._checked()
        self._is_idle = False

    def control(self, name: str, args: dict[str, Any]) -> Any:
        """A management operation of the core, or else of the workers (`worker.NAME`)."""
        if name.startswith(OF_WORKERS):
            return self.executor.control(name.removeprefix(OF_WORKERS), args)
        if name not in self._operations:
            raise UserError(f"control {name!r}: there is no such operation.{suggestion(name, self._operations)}")
        self._is_idle = False  # what it releases may let somebody start
        return self._operations[name](**args)

    # ------------------------------------------------------------------------------------------ messages out

    @property
    def has_work(self) -> bool:
        """False: `step` would do nothing until the next message comes in."""
        return not self._is_idle

    def step(self) -> EngineOutputs:
        """One iteration: decides a step, and settles the earliest one unless more may be in flight.

        Requests that ended without running (refused, aborted) are reported here as well.
        """
        failpoint("before_schedule")
        observers = self._observers
        observers.begins()
        decision = self.scheduler.schedule()
        if decision is not None:
            observers.decided(decision, self.scheduler.work_in_flight)
            failpoint("before_execute")
            observers.ends("schedule")
            self._in_flight.append(self.executor.execute(decision))
            observers.ends("execute")
        else:
            observers.ends("schedule")
        if len(self._in_flight) > (self._depth if decision is not None else 0):
            answer = self._in_flight.popleft().result()
            observers.ends("wait")
            outputs = self.scheduler.update_from_output(answer)
        else:
            self._is_idle = not self._in_flight and not self.scheduler.wait_for_prerequisites()
            outputs = EngineOutputs(step=0)
            self.scheduler.take_events(outputs)
        observers.settled()
        if self._check_invariants or self.scheduler.take_doubt():
            self._checked()
        observers.ends("update")
        return outputs

    def steady_horizon(self, *, beyond_ends: bool = False) -> tuple[IntArray, IntArray]:
        """(rows, steps of each): each of these rows gets one token in so many steps from the next one on, and nothing
        else happens but that they end, in the last of these steps or, `beyond_ends`, in any. For whoever knows without
        a worker what the steps sample, and what they take."""
        if self._in_flight or self._observers.needs_decisions:
            return NO_INTS, NO_INTS
        return self.scheduler.steady_horizon(beyond_ends=beyond_ends)

    def begin_leap(self, *, beyond_ends: bool = False) -> tuple[SchedulerOutput, IntArray] | None:
        """Decides a step, where `steady_horizon` has nothing to say. If each of its rows samples a token in it and
        in steps after it: what was decided, and steps of each row; `advance` makes these. None: `step` makes it."""
        if self._in_flight or self._observers.needs_decisions:
            return None
        return self.scheduler.begin_leap(beyond_ends=beyond_ends)

    def room_in_leap(self, rows: IntArray) -> Room | None:
        """For those who come while these rows get their tokens: they may join. None: nobody may."""
        return self.scheduler.room_in_leap(rows)

    def advance(
        self,
        rows: IntArray,
        steps: IntArray,
        sample: Callable[[], IntArray],
        joins: Sequence[Join],
        on_start: Callable[[SchedulerOutput], None],
    ) -> tuple[IntArray, EngineOutputs]:
        """So many of these steps for each row; `sample`: asked for the tokens, of one row after the other, if something
        depends on them. `joins`: requests that come meanwhile, and have found room, by step; `on_start` hears what
        was decided of them. Blocks that are held in each step, and who ended, in order."""
        held = self.scheduler.advance(rows, steps, sample, joins, on_start)
        outputs = EngineOutputs(step=0)
        self.scheduler.take_events(outputs)
        self._observers.settled()
        if self._check_invariants:
            self._checked()
        return held, outputs

    def watch_steps(self, on_step: Callable[[SchedulerOutput, int], None]) -> None:
        """Has `on_step` called before each step: what was decided, and the work of all steps under way with it, in
        tokens."""
        self._observe(WatchedDecisions(on_step))

    def count_times(self, times: NoStepTimes) -> None:
        """Has the parts of each step counted there."""
        self.times = times
        self._observe(TimedSteps(times))

    def _observe(self, observer: StepObserver) -> None:
        self._observers = StepObservers((*self._observers.observers, observer))

    def watch_arrivals(self, descriptor: int) -> None:
        """Has a step in which rows get several tokens end early as soon as something can be read there."""
        if self.scheduler.most_tokens > 1:
            self.executor.control(WATCH_ARRIVALS, {"descriptor": descriptor})

    def watch_cache(self, tell: Callable[[CacheChanged], None], name: Callable[[bytes], int] | None = None) -> None:
        """Has `tell` called with what a step has changed in the prefix cache, where that was asked for. `name`: how a
        block is called then, if not by its public number."""
        if self._feed is not None:
            self._feed.watch(tell, name)

    def held_in_cache(self) -> CacheChanged | None:
        """All that was told of and is still there; None: nothing, or nobody has asked for it."""
        return None if self._feed is None else self._feed.held()

    def loss_descriptors(self) -> tuple[int, ...]:
        return self.executor.loss_descriptors()

    def check_workers(self) -> None:
        self.executor.check_workers()

    def statistics(self) -> dict[str, float]:
        own = {**self.scheduler.statistics(), **self._weights.statistics(), **self._memory.statistics()}
        if times := self.times.statistics():
            own |= {**times, **self.executor.control(STEP_TIMES, {})}
        return own

    def tend(self, now: float) -> float | None:
        """For whoever drives it, between two steps: what can be done for the memory at this time. Seconds until it
        should be called again; None: not before the next message."""
        if self.scheduler.manager.moves.are_pending:
            return None  # the next step reads blocks that are free by now, such as those on their way to swap space
        return self._memory.tend(now)

    def shutdown(self) -> None:
        failpoint("end_worker")
        if self._feed is not None:
            self._feed.close()
        self.executor.shutdown()

    def _reset_prefix_cache(self) -> bool:
        self.scheduler.reset_prefix_cache()
        return True

    def _checked(self) -> bool:
        self.scheduler.check_invariants()
        return True
