"""Several workers that share a model (4.3.1): rank 0 in this process, a process for each of the others.

    core ---- decision (one message, encoded once) ----> rank 1, 2 ...          each computes its heads and columns,
      |                                                    |                    and they add up by shared memory
      +-- rank 0 (in-process executor) <-- sums --> -------+                    (kernels/ranks.py)
      +<----- digest of what was sampled ------------------+

Every rank that has the last layers draws the same tokens, so none is sent: a digest shows that they agree. Where the
layers are divided over stages, the last one answers to the step, and the others hear of it with the next decision. A
rank that ends, stands still or differs ends the engine with an error that names it; whoever started the engine starts
it again.

Owns what a placement has started (placement.py). Must never decide anything about a step.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from quire import errors
from quire.config import RankGrid, WorkerConfig
from quire.engine_core.executor.executor import RESIDENT_MEMORY, STEP_TIMES, PendingStep
from quire.engine_core.executor.in_process import InProcessExecutor
from quire.engine_core.executor.placement import Placement, Rank, Reply, Sight
from quire.engine_core.executor.rank_channel import (
    Call,
    CallDone,
    Failed,
    RankMessage,
    StepAnswer,
    StepDone,
    digest_of,
    encode_message,
    encode_step,
)
from quire.errors import EngineError, QuireError
from quire.messages import LayerSpec, SchedulerOutput, StepOutput, WorkerCapacity
from quire.state_layout import state_layout

# How long a rank may be behind the others, which have done the same work by then.
LONGEST_LAG = 2.0
# ... and how long a signal may have stopped it, whether there is work or not.
LONGEST_STOP = 1.0
_LOOK_SECONDS = 0.25
# a call may load a model or measure it; a rank that ends meanwhile is noticed at once
_LOADING_SECONDS = 3600.0
logger = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=RankMessage)


class RankWatch:
    """Looks whether all ranks are there and keep up. Once one is lost, nobody waits for it any more."""

    def __init__(self, placement: Placement, grid: RankGrid) -> None:
        self._ranks = tuple(placement.ranks)
        self._placement = placement
        self._grid = grid
        self._lost: str | None = None
        self._ending = threading.Event()
        # readable once a rank is lost: wakes a core that has nothing to do
        self.loss_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # looks at which a rank had met those of a group less often than one of them, and no more often than before
        self._num_arrivals: dict[tuple[tuple[int, ...], int], int] = {}
        self._num_behind: Counter[tuple[tuple[int, ...], int]] = Counter()
        # by rank: its processor time, and looks at which that was the same though nobody kept it waiting
        self._ticks = dict.fromkeys(range(1, grid.size), -1)
        self._num_idle = dict.fromkeys(range(1, grid.size), 0)
        # ... and at which it was stopped
        self._num_stopped = {rank.number: 0 for rank in self._ranks}
        self._thread = threading.Thread(target=self._look, name="quire-rank-watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Which rank, and how."""
        return self._lost

    def lose(self, what: str) -> None:
        if self._lost is None and not self._ending.is_set():
            logger.error("%s", what)
            self._lost = what
            os.eventfd_write(self.loss_descriptor, 1)
        self._placement.abort()

    def close(self) -> None:
        """May be called twice."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._thread.join()
        os.close(self.loss_descriptor)

    def _look(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.process.end_descriptor, selectors.EVENT_READ, rank)
            while not self._ending.is_set() and self._lost is None:
                for key, _ in selector.select(_LOOK_SECONDS):
                    ended: Rank = key.data
                    self.lose(f"rank {ended.number} has ended ({ended.process.how_it_ended()})")
                sight = self._placement.look()
                if sight.has_lost_others:
                    self.lose("ranks on several machines have lost each other")
                self._look_who_is_stopped(sight)
                self._look_who_is_behind(sight)
                if self._grid.pipeline > 1 or self._placement.has_crossings:
                    self._look_who_does_nothing(sight)

    def _look_who_is_stopped(self, sight: Sight) -> None:
        """Seen without any work: nobody's request has to find out."""
        for number, seen in sight.ranks.items():
            self._num_stopped[number] = self._num_stopped[number] + 1 if seen.is_stopped else 0
            if self._num_stopped[number] > LONGEST_STOP / _LOOK_SECONDS:
                self.lose(f"rank {number} stands still: a signal has stopped it")

    def _look_who_is_behind(self, sight: Sight) -> None:
        """By looks and not by a clock: who was stopped together with this thread is not to blame."""
        for group, arrivals in sight.arrivals.items():
            for rank, count in zip(group, arrivals, strict=True):
                # one that is slow in every step is behind at every look, and gets on
                is_behind = count < max(arrivals) and count == self._num_arrivals.get((group, rank), 0)
                self._num_arrivals[group, rank] = count
                self._num_behind[group, rank] = self._num_behind[group, rank] + 1 if is_behind else 0
                if self._num_behind[group, rank] > LONGEST_LAG / _LOOK_SECONDS:
                    self.lose(f"rank {rank} stands still while the others wait for it")

    def _look_who_does_nothing(self, sight: Sight) -> None:
        """Stages do not meet at the same places: one that has work, waits for nobody and gets no processor time stands
        still. Who computes for long does not."""
        for rank in self._ranks:
            number = rank.number
            seen = sight.ranks.get(number)
            if seen is None:
                # nobody has told of it yet
                continue
            ticks = seen.cpu_ticks
            is_idle = ticks == self._ticks[number] and rank.has_work and not seen.is_waiting
            self._ticks[number] = ticks
            self._num_idle[number] = self._num_idle[number] + 1 if is_idle else 0
            if self._num_idle[number] > LONGEST_LAG / _LOOK_SECONDS:
                self.lose(f"rank {number} stands still in the middle of a step")


class GroupExecutor:
    """Runs each step on all ranks."""

    def __init__(self, config: WorkerConfig, placement: Placement) -> None:
        self._grid = config.grid
        self._size = config.grid.size
        self._slots_per_block = config.slots_per_block
        # of a pipeline: layers of all stages, and answers that those before the last one have not heard of yet
        self._layers: list[LayerSpec] = []
        self._answers: list[StepOutput] = []
        # of steps, to all ranks
        self._num_sent_bytes = 0
        self._placement = placement
        self._ranks = tuple(placement.ranks)
        self._watch = RankWatch(placement, config.grid)
        self._first: InProcessExecutor | None = None
        try:
            of_first = config.of_rank(0)
            around_first = self.joined(lambda: placement.ranks_around_first(of_first))
            self._everywhere("load", [], lambda: self._load(of_first, around_first))
        except BaseException:
            self.shutdown()
            raise

    def run_ahead(self) -> None:
        self._own.run_ahead()

    def measure_capacity(self) -> WorkerCapacity:
        """That of the least, and where they share a memory, a share of it."""
        num_sharing = max(self._placement.num_neighbours(number) for number in range(self._size))
        own, others = self._everywhere(
            "measure_capacity", [num_sharing], lambda: self._own.measure_capacity(num_sharing)
        )
        all_ranks = [own, *(msgspec.convert(other, WorkerCapacity) for other in others)]
        own.available_bytes = min(one.available_bytes for one in all_ranks)
        own.free_bytes = min(one.free_bytes for one in all_ranks)
        own.host_bytes = min(one.host_bytes for one in all_ranks)
        own.step_bytes = sum(one.step_bytes for one in all_ranks)
        own.seconds_per_token = max(one.seconds_per_token for one in all_ranks)
        own.seconds_per_step = max(one.seconds_per_step for one in all_ranks)
        own.seconds_per_pair = max(one.seconds_per_pair for one in all_ranks)
        if self._grid.pipeline > 1:
            of_stages = [all_ranks[self._grid.rank_at(stage, 0, 0)].layers for stage in range(self._grid.pipeline)]
            own.layers = [layer for layers in of_stages for layer in layers]
            own.num_layers_of_stages = [len(layers) for layers in of_stages]
            self._layers = own.layers
        return own

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        # a stage cannot know: it has some of the layers
        states = state_layout(self._layers, groups, self._slots_per_block)
        arguments = groups, num_blocks, num_host_blocks, states.num_blocks if states else 0
        self._everywhere("initialize_cache", list(arguments), lambda: self._own.initialize_cache(*arguments))

    def execute(self, output: SchedulerOutput) -> PendingStep:
        self.check_workers()
        answers = self._answers
        self._answers = []
        message = encode_step(output, answers)
        self._num_sent_bytes += len(message) * len(self._ranks)
        logger.debug("step %d: a message of %d bytes for each of %d ranks", output.step, len(message), len(self._ranks))
        replies = [self._ask(rank, message, is_step=True) for rank in self._ranks]
        return _GroupStep(self, self._own.execute(output, answers), replies)

    def control(self, name: str, args: dict[str, Any]) -> Any:
        """What rank 0 says, or else the first that has something to say: a fault may be in what it has alone. Where
        every rank has a part, all of them."""
        if name == STEP_TIMES:
            # they do the same at the same time
            return {**self._own.control(name, args), "step_bytes_ranks_total": self._num_sent_bytes}
        own, others = self._everywhere("control", [name, args], lambda: self._own.control(name, args))
        return _JOINED.get(name, _first_to_say)([own, *others])

    def loss_descriptors(self) -> tuple[int, ...]:
        return (self._watch.loss_descriptor,)

    def check_workers(self) -> None:
        if self._watch.lost is not None:
            raise EngineError(f"{self._watch.lost}.")

    def shutdown(self) -> None:
        self._placement.abort()
        self._watch.close()
        self._placement.close()
        if self._first is not None:
            self._first.shutdown()
            self._first = None

    # ------------------------------------------------------------------------------------------ inside

    @property
    def _own(self) -> InProcessExecutor:
        assert self._first is not None, "it was shut down"
        return self._first

    def _load(self, config: WorkerConfig, ranks: Any) -> None:
        self._first = InProcessExecutor(config, ranks)

    def _everywhere(self, name: str, arguments: list[Any], own: Callable[[], T]) -> tuple[T, list[Any]]:
        """The same call on all ranks at once: inside of it they may wait for each other."""
        message = encode_message(Call(name, arguments))
        replies = [self._ask(rank, message) for rank in self._ranks]
        value = self.joined(own)
        return value, [self.answer(reply, CallDone, _LOADING_SECONDS).value for reply in replies]

    def _ask(self, rank: Rank, message: bytes, *, is_step: bool = False) -> Reply:
        try:
            reply = rank.ask(message)
        except OSError as error:
            raise self._gone(rank) from error
        reply.is_step = is_step
        return reply

    def joined(self, own: Callable[[], T]) -> T:
        """What rank 0 does. If it fails nobody may wait for it; if another one is lost what it did means nothing."""
        try:
            value = own()
        except BaseException as error:
            self._placement.abort()
            if self._watch.lost is not None:
                raise EngineError(f"{self._watch.lost}.") from error
            raise
        if self._placement.is_aborted and self._watch.lost is not None:
            raise EngineError(f"{self._watch.lost}.")
        return value

    def answer(self, reply: Reply, kind: type[M], seconds: float | None = None) -> M:
        """What another rank has said, in so many seconds, or as long as the watch finds that it gets on."""
        rank = reply.rank
        longest = math.inf if seconds is None else seconds
        end = time.monotonic() + longest
        try:
            message = rank.wait_for(reply, min(longest, _LOOK_SECONDS))
            while message is None and self._watch.lost is None and time.monotonic() < end:
                message = rank.wait_for(reply, _LOOK_SECONDS)
        except (EOFError, OSError) as error:
            raise self._gone(rank) from error
        if message is None:
            self._watch.lose(f"rank {rank.number} stands still")
            raise EngineError(f"{self._watch.lost}.")
        if isinstance(message, Failed):
            self._placement.abort()
            self.check_workers()
            error_class = getattr(errors, message.kind, EngineError)
            raise error_class(message.text if message.kind else f"rank {rank.number} failed: {message.text}")
        assert isinstance(message, kind)
        return message

    def settled(self, own: StepOutput, replies: list[Reply]) -> StepOutput:
        """The answer to a step, by the first of those ranks that sample: rank 0, or one of the last stage. What the
        others of them sampled is the same."""
        first = self._grid.first_of_last_stage
        between = self._grid.firsts_of_stages[1:-1] if own.spilled else []
        for number in between:
            # before the last one: what they have spilled may be more than fits into a channel that nobody reads
            self.answer(replies[number - 1], StepDone)
        if first == 0:
            output = own
        else:
            output = self.answer(replies[first - 1], StepAnswer).output
            self._answers.append(output)
        digest = digest_of(output)
        for reply in replies:
            number = reply.rank.number
            if number == first:
                continue
            found = self.answer(reply, StepDone, LONGEST_LAG).digest
            if number > first and found != digest:
                self._watch.lose(f"rank {number} sampled something else than rank {first}")
                raise EngineError(f"{self._watch.lost}. Neither can be trusted.")
        if own.spilled:
            parts = [own.spilled, *(replies[number - 1].spilled for number in self._grid.firsts_of_stages[1:])]
            self._own.keep(_whole_blocks(parts))
        return output

    def _gone(self, rank: Rank) -> QuireError:
        self._watch.lose(f"rank {rank.number} has gone away")
        return EngineError(f"{self._watch.lost}.")


def _whole_blocks(parts: list[dict[bytes, bytes]]) -> dict[bytes, bytes]:
    """Of blocks of which every stage has its part."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: b"".join(part[name] for part in parts) for name in names}


def _first_to_say(answers: list[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)


def state_of_all(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Nobody may use an adapter before all ranks have it; what it is made of, all of them say together."""
    names = [state["state"] for state in states]
    state = next((name for name in ("failed", "loading") if name in names), "ready")
    error = next((one["error"] for one in states if one["error"] is not None), None)
    contents = ",".join(one["content"] for one in states)
    return {"state": state, "error": error, "content": contents if state == "ready" else ""}


def sums(statistics: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in statistics) for name in statistics[0]}


# how the answers of all ranks to a control become one
_JOINED: dict[str, Callable[[list[Any]], Any]] = {"adapter_state": state_of_all, RESIDENT_MEMORY: sums}


class _GroupStep:
    """A step that all ranks were told to run."""

    def __init__(self, group: GroupExecutor, own: PendingStep, replies: list[Reply]) -> None:
        self._group = group
        self._own = own
        self._replies = replies

    def result(self) -> StepOutput:
        return self._group.settled(self._group.joined(self._own.result), self._replies)
