"""What stands between a core and whoever runs it: messages go in, the core steps, messages come out.

Used by the core's process and by the thread of a core, so that both behave alike.
Owns the answers that were not yet taken. It must not know where messages come from or go to.
"""

from __future__ import annotations

import importlib
import logging
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from quire.errors import EngineDeadError, QuireError
from quire.failpoints import failpoint
from quire.messages import (
    AbortRequests,
    CacheChanged,
    ControlCall,
    ControlReply,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    PermitTokens,
    SchedulerOutput,
    ToClient,
    ToCore,
    split_sequence_id,
)
from quire.observability.step_times import NoStepTimes

if TYPE_CHECKING:
    from quire.config import EngineConfig

# It asks whether the run is to be recorded, and has launch.py build the core in any case.
DEFAULT_CORE = "quire.engine_core.recorded_core:build_core"
logger = logging.getLogger(__name__)


class Core(Protocol):
    """An engine core as its driver sees it."""

    ready: EngineReady
    # of its steps, and of what is done around them
    times: NoStepTimes

    @property
    def has_work(self) -> bool: ...
    def add(self, request: EngineRequest) -> None: ...
    def extend(self, extension: ExtendRequest) -> None: ...
    def permit(self, permit: PermitTokens) -> None: ...
    def abort(self, aborts: AbortRequests) -> None: ...
    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None: ...
    def control(self, name: str, args: dict[str, Any]) -> Any: ...
    def step(self) -> EngineOutputs: ...
    def shutdown(self) -> None: ...

    def watch_steps(self, on_step: Callable[[SchedulerOutput, int], None]) -> None:
        """Has `on_step` called before each step: what was decided, and the work of all steps under way with it, in
        tokens."""

    def watch_arrivals(self, descriptor: int) -> None:
        """Has a step in which rows get several tokens end early as soon as something can be read there."""

    def watch_cache(self, tell: Callable[[CacheChanged], None]) -> None:
        """Has `tell` called with what a step has changed in the prefix cache, where that was asked for."""

    def held_in_cache(self) -> CacheChanged | None:
        """All that `watch_cache` has told of and that is still there; None: nothing, or nobody has asked for it."""

    def loss_descriptors(self) -> tuple[int, ...]:
        """Files that become readable when a worker is lost: they wake a sleeping core, and `step` then looks."""

    def check_workers(self) -> None:
        """Raises if one is."""

    def tend(self, now: float) -> float | None:
        """Called between steps: gives back memory that is idle, a piece at a time. Seconds until the next call."""


class CoreDriver:
    """One core and its unsent answers. After a failure it has no work and takes no more messages."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._outbox: list[ToClient] = [core.ready]
        self._num_steps = 0
        self.is_dead = False
        self.times = core.times
        core.watch_cache(lambda message: self._outbox.append(message))
        # what control calls may ask besides the core's own operations
        self.operations: dict[str, Callable[..., Any]] = {"set_log_level": _set_log_level}

    @classmethod
    def build(cls, config: EngineConfig, core: str | None = None) -> CoreDriver:
        """Builds the core that "module:function" makes of a configuration; raises what that function raises."""
        module, _, function = (core or DEFAULT_CORE).partition(":")
        return cls(getattr(importlib.import_module(module), function)(config))

    @property
    def has_work(self) -> bool:
        return not self.is_dead and self.core.has_work

    def handle(self, message: ToCore) -> None:
        if self.is_dead:
            return
        try:
            self._dispatch(message)
        except Exception as error:
            self._contain(message, error)

    def step(self) -> None:
        """One step of the core. An exception in it ends this engine, with a last message that says why."""
        if not self.has_work:
            self._look_at_workers()
            return
        self._num_steps += 1
        try:
            outputs = self.core.step()
        except BaseException as error:  # of whatever kind: all who wait would wait for ever
            self._die(error, f"in step {self._num_steps}")
            return
        if not outputs.is_empty:
            self._outbox.append(outputs)

    def tend(self) -> float | None:
        """For the loop that steps: what waits for no message and for no step. Seconds until it should be called again,
        None if nothing is to do before the next message."""
        if self.is_dead:
            return None
        try:
            return self.core.tend(time.monotonic())
        except Exception as error:
            self._die(error, "while it gave memory back")
            return None

    def _look_at_workers(self) -> None:
        """Whoever asks next would otherwise pay for a worker that was lost while there was nothing to do."""
        if self.is_dead:
            return
        try:
            self.core.check_workers()
        except Exception as error:
            self._die(error, "while it had no work")

    def take(self) -> list[ToClient]:
        outbox = self._outbox
        self._outbox = []
        return outbox

    def shutdown(self) -> None:
        self.is_dead = True
        self.core.shutdown()

    def _dispatch(self, message: ToCore) -> None:
        match message:
            case EngineRequest():
                failpoint("receive_request", (message.request_id,))
                self.core.add(message)
            case ExtendRequest():
                self.core.extend(message)
            case PermitTokens():
                self.core.permit(message)
            case AbortRequests():
                self.core.abort(message)
            case ControlCall():
                self.times.ends("receive")
                self._outbox.append(self._control(message))
                self.times.ends("control")

    def _control(self, call: ControlCall) -> ControlReply:
        """A management call that fails is answered with its error; the engine goes on, unless that says otherwise."""
        try:
            if (operation := self.operations.get(call.name)) is not None:
                return ControlReply(call_id=call.call_id, result=operation(**call.args))
            return ControlReply(call_id=call.call_id, result=self.core.control(call.name, call.args))
        except EngineDeadError as error:
            self._die(error, f"in {call.name}")
            return ControlReply(call_id=call.call_id, error=str(error))
        except QuireError as error:
            return ControlReply(call_id=call.call_id, error=str(error))
        except Exception as error:
            logger.exception("control call %s failed", call.name)
            return ControlReply(call_id=call.call_id, error=f"{call.name} failed: {type(error).__name__}: {error}")

    def _contain(self, message: ToCore, error: Exception) -> None:
        """What the core stumbles over ends the requests that the message is about. If the core contradicts itself
        afterwards, everybody's answers would be in doubt, and it ends itself."""
        kind = type(message).__name__
        logger.error("the engine core could not take a %s; its requests end", kind, exc_info=error)
        reason = f"the engine could not take this {kind} ({type(error).__name__})."
        try:
            for request_id, num_outputs in _requests_of(message).items():
                self.core.fail(request_id, reason, num_outputs)
        except Exception as second:
            self._die(second, f"while it took a {kind}")

    def _die(self, error: BaseException, where: str) -> None:
        logger.error("the engine core failed %s", where, exc_info=error)
        self.is_dead = True
        self._outbox.append(
            EngineFailed(
                kind=EngineDeadError.__name__,
                error=f"The engine failed {where}: {type(error).__name__}: {error}. Requests in flight are lost.",
            )
        )


def _requests_of(message: ToCore) -> dict[int, int]:
    """The requests that a message is about, and how many outputs its sender waits for if the core knows nothing yet."""
    match message:
        case EngineRequest():
            return {message.request_id: message.sampling.n}
        case ExtendRequest() | PermitTokens():
            return {message.request_id: 0}
        case AbortRequests():
            of_sequences = (split_sequence_id(sequence_id)[0] for sequence_id in message.sequence_ids)
            return dict.fromkeys([*message.request_ids, *of_sequences], 0)
        case _:
            return {}


def failure_at_start(error: BaseException) -> EngineFailed:
    """The last message of a core that could not be built. What is not Quire's own error brings its traceback."""
    if isinstance(error, QuireError):
        return EngineFailed(kind=type(error).__name__, error=str(error))
    last_call = "".join(traceback.format_exception(error)[-2:]).strip()
    return EngineFailed(kind="EngineError", error=f"The engine could not start: {last_call}")


def _set_log_level(level: int) -> None:
    logging.getLogger("quire").setLevel(level)
