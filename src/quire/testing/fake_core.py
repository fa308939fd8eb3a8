"""An engine core without a model: the same interface, answers at once, tokens that a test can foretell.

A prompt that is pooled becomes four numbers (`vector_of`). Greedy sequences repeat their prompt token by token; others
follow from seed, sequence and position. Ends are found as the real core finds them. Sequence k of a request gets k
tokens fewer, so that sequences end at different times. Beams are told of in `fake_beams`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.errors import ModelError, UserError
from quire.messages import (
    AbortRequests,
    CacheChanged,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    PermitTokens,
    SchedulerOutput,
    SequenceEnd,
    SequenceLogprobs,
    SequenceStart,
    SequenceVector,
    TokenLogprobs,
    int_array,
    sequence_id_of,
    split_sequence_id,
)
from quire.observability.step_times import NoStepTimes
from quire.testing.fake_beams import BeamTokens, FakeBeams
from quire.testing.fake_observation import OBSERVING, observing_operations

MAX_MODEL_LEN = 256
# seconds
_LONGEST_STEP = 20.0


def build(config: EngineConfig) -> FakeCore:
    """For `open_link(config, core="quire.testing.fake_core:build")`."""
    return FakeCore(
        vocab_size=config.facts.vocab_size,
        max_model_len=min(config.max_model_len, MAX_MODEL_LEN),
        max_num_seqs=config.max_num_seqs,
    )


def build_with_users_mistake(config: EngineConfig) -> FakeCore:
    raise ModelError("model=x: this checkpoint is broken.")


def build_with_own_mistake(config: EngineConfig) -> FakeCore:
    raise ZeroDivisionError("the loader divides by zero")


def build_and_die(config: EngineConfig) -> FakeCore:
    os._exit(7)


def build_for_ever(config: EngineConfig) -> FakeCore:
    """As a model that takes long to load; says so first."""
    print("building", file=sys.stderr, flush=True)
    threading.Event().wait()
    raise AssertionError("nothing sets this event")


def vector_of(prompt: list[int], pooling: str = "last") -> NDArray[np.float32]:
    """The pooled numbers of a prompt; its length is not 1."""
    last = prompt[-1] if pooling == "last" else sum(prompt) / len(prompt)
    return np.array([3.0, last, len(prompt), -0.1], dtype=np.float32)


class FakeSequence:
    def __init__(self, request: EngineRequest, index: int, max_model_len: int) -> None:
        self.request = request
        self.index = index
        self.sequence_id = sequence_id_of(request.request_id, index)
        self.token_ids: list[int] = []
        self.room = max_model_len - len(request.prompt_token_ids)
        # it waits when it has so many tokens; and those that come next, whatever it would say
        self.permitted: float = math.inf if request.permitted is None else request.permitted
        self.put: list[int] = []

    @property
    def num_cached_tokens(self) -> int:
        """What it is said to have found in the prefix cache."""
        return 0

    def next_token(self, vocab_size: int) -> int:
        prompt, position = self.request.prompt_token_ids, len(self.token_ids)
        if self.request.sampling.is_greedy:
            return prompt[position % len(prompt)]
        return (self.request.seed * 31 + self.index * 17 + position * 7) % vocab_size

    def end(self, token_id: int) -> SequenceEnd | None:
        sampling = self.request.sampling
        count = len(self.token_ids)
        if count >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return SequenceEnd(self.sequence_id, "stop", stop_reason=token_id)
            if token_id in self.request.eos_token_ids:
                return SequenceEnd(self.sequence_id, "stop")
        limit = self.room if sampling.max_tokens is None else min(self.room, sampling.max_tokens)
        if count >= max(1, limit - self.index):
            return SequenceEnd(self.sequence_id, "length")
        return None


class FakeCore:
    """Every open sequence gets a token in every step. A test that has the core in its hands may write to

    refusal     why it refuses every request
    failures    number of tokens -> why a sequence fails when it has so many
    hold_at     sequences wait when they have so many tokens
    """

    times = NoStepTimes()

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int = MAX_MODEL_LEN,
        max_num_seqs: int = 256,
        make_sequence: Callable[[EngineRequest, int, int], FakeSequence] = FakeSequence,
    ) -> None:
        self.ready = EngineReady(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_blocks=64,
            block_size=16,
            report=["a core without a model"],
        )
        self.is_shut_down = False
        self._vocab_size = vocab_size
        self._sequences: dict[int, FakeSequence] = {}
        self._beams: dict[int, FakeBeams] = {}
        self._events = EngineOutputs(step=0)
        self._num_steps = 0
        self._num_aborted = 0
        self._fails_next_step = False
        self._interrupts_next_step = False
        self._make_sequence = make_sequence
        self.refusal: str | None = None
        self.failures: dict[int, str] = {}
        self.hold_at: float = math.inf
        # -1: nobody tells of arrivals. Whether there was one in the step that waited for it.
        self._arrivals = -1
        self._num_steps_to_await = 0
        self.came_in_step = False
        self._operations: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": lambda: True,
            "statistics": self.statistics,
            "echo": lambda **args: args,
            "worker.open_vocabulary": lambda vocabulary: None,
            "worker.prepare_form": lambda form: True,
            "worker.statistics": lambda: {"num_compiled_grammars": 1},
            "hold": self._hold,
            "await_arrival": self._await_arrival,
            "fail_next_step": self._fail_next_step,
            "interrupt_next_step": self._interrupt_next_step,
            "fail_requests": self._fail_requests,
            "fail_at": self._fail_at,
            "exit": os._exit,
        }

    @property
    def has_work(self) -> bool:
        return bool(self._granted() or self._granted_beams()) or not self._events.is_empty

    def add(self, request: EngineRequest) -> None:
        refusal = self.refusal
        if len(request.prompt_token_ids) + (not request.pooling) > self.ready.max_model_len:
            refusal = "the prompt is too long"
        if refusal is None and request.decoding is not None:
            self._beams[request.request_id] = FakeBeams(request)
            self._events.starts.append(SequenceStart(sequence_id_of(request.request_id, 0), 0))
            return
        for index in range(request.sampling.n):
            if refusal is not None:
                sequence_id = sequence_id_of(request.request_id, index)
                self._events.ends.append(SequenceEnd(sequence_id, "error", error=refusal))
                continue
            sequence = self._make_sequence(request, index, self.ready.max_model_len)
            self._sequences[sequence.sequence_id] = sequence

    def extend(self, extension: ExtendRequest) -> None:
        for sequence in self._sequences.values():
            if sequence.request.request_id == extension.request_id and sequence.index == 0:
                sequence.request.prompt_token_ids.extend(extension.token_ids)
                sequence.room -= len(extension.token_ids)
                sequence.request.is_final = extension.is_final
        beams = self._beams.get(extension.request_id)
        if beams is not None:
            beams.request.prompt_token_ids.extend(extension.token_ids)
            beams.request.is_final = extension.is_final

    def permit(self, permit: PermitTokens) -> None:
        sequence = self._sequences.get(sequence_id_of(permit.request_id, permit.index))
        if sequence is not None:
            sequence.permitted = permit.num_tokens
            sequence.put += permit.token_ids

    def abort(self, aborts: AbortRequests) -> None:
        for sequence_id in list(self._sequences):
            if split_sequence_id(sequence_id)[0] in aborts.request_ids or sequence_id in aborts.sequence_ids:
                del self._sequences[sequence_id]
                self._num_aborted += 1
                self._events.ends.append(SequenceEnd(sequence_id, "abort"))
        for request_id in aborts.request_ids:
            if (beams := self._beams.pop(request_id, None)) is not None:
                self._num_aborted += len(beams.sequence_ids)
                self._events.ends += [SequenceEnd(sequence_id, "abort") for sequence_id in beams.sequence_ids]

    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None:
        known = [one for one in self._sequences if split_sequence_id(one)[0] == request_id]
        for sequence_id in known or [sequence_id_of(request_id, index) for index in range(num_outputs)]:
            self._sequences.pop(sequence_id, None)
            self._events.ends.append(SequenceEnd(sequence_id, "error", error=reason))

    def control(self, name: str, args: dict[str, Any]) -> Any:
        if name in OBSERVING and name not in self._operations:
            self._operations.update(observing_operations())
        if name not in self._operations:
            raise UserError(f"control {name!r}: there is no such operation.")
        return self._operations[name](**args)

    def step(self) -> EngineOutputs:
        if self._fails_next_step and (self._sequences or self._beams):
            raise RuntimeError("the step was told to fail")
        self._num_steps += 1
        if self._sequences or self._beams:
            self._look_for_arrivals()
        outputs, self._events = self._events, EngineOutputs(step=0)
        outputs.step = self._num_steps
        sequence_ids, token_ids = [], []
        if self._interrupts_next_step:
            self._interrupts_next_step = False
            # of the process, as from a keyboard: its main thread gets it, and may be in the middle of a wait
            os.kill(os.getpid(), signal.SIGINT)
        for sequence in self._granted():
            if (error := self.failures.get(len(sequence.token_ids))) is not None:
                self._fail(sequence, error, outputs)
                continue
            if sequence.request.pooling:
                self._pool(sequence, outputs)
                continue
            token_id = sequence.put.pop(0) if sequence.put else sequence.next_token(self._vocab_size)
            self._report(sequence, token_id, outputs)
            sequence_ids.append(sequence.sequence_id)
            token_ids.append(token_id)
        for beams in self._granted_beams():
            for new in beams.step():
                self._report_beam(beams, new, outputs)
                sequence_ids += [new.sequence_id] * len(new.token_ids)
                token_ids += new.token_ids
        outputs.sequence_ids, outputs.token_ids = int_array(sequence_ids), int_array(token_ids)
        return outputs

    @property
    def running(self) -> set[int]:
        """Requests with sequences that have not ended."""
        return {split_sequence_id(sequence_id)[0] for sequence_id in self._sequences} | self._beams.keys()

    def statistics(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self.running),
            "num_blocks": self.ready.num_blocks,
            "num_blocks_held": self.ready.num_blocks // 4,
            "steps": self._num_steps,
            "sequences_running": len(self._sequences) + len(self._beams),
            "sequences_aborted": self._num_aborted,
            "came_in_step": self.came_in_step,
        }

    def watch_steps(self, on_step: Callable[[SchedulerOutput, int], None]) -> None: ...

    def watch_arrivals(self, descriptor: int) -> None:
        self._arrivals = descriptor

    def watch_cache(self, tell: Callable[[CacheChanged], None]) -> None: ...

    def held_in_cache(self) -> CacheChanged | None:
        return None

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None: ...

    def tend(self, now: float) -> float | None:
        return None

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _granted(self) -> list[FakeSequence]:
        return [
            sequence
            for sequence in self._sequences.values()
            if sequence.request.is_final and len(sequence.token_ids) < min(self.hold_at, sequence.permitted)
        ]

    def _granted_beams(self) -> list[FakeBeams]:
        return [beams for beams in self._beams.values() if beams.request.is_final and beams.num_settled < self.hold_at]

    def _report_beam(self, beams: FakeBeams, new: BeamTokens, outputs: EngineOutputs) -> None:
        count = beams.request.sampling.logprobs
        assert count is not None, "the client asks for the log-probabilities that beams are judged by"
        positions = [self._logprobs(token_id, count, new.logprob) for token_id in new.token_ids]
        outputs.logprobs.append(SequenceLogprobs(new.sequence_id, positions))
        if new.end is not None:
            outputs.ends.append(new.end)
            self._beams.pop(beams.request.request_id, None)

    def _report(self, sequence: FakeSequence, token_id: int, outputs: EngineOutputs) -> None:
        sampling = sequence.request.sampling
        if not sequence.token_ids:
            outputs.starts.append(SequenceStart(sequence.sequence_id, sequence.num_cached_tokens))
            if sampling.prompt_logprobs is not None and sequence.index == 0:
                prompt = sequence.request.prompt_token_ids[1:]
                positions = [self._logprobs(token, sampling.prompt_logprobs) for token in prompt]
                outputs.prompt_logprobs.append(SequenceLogprobs(sequence.sequence_id, positions))
        sequence.token_ids.append(token_id)
        if sampling.logprobs is not None:
            positions = [self._logprobs(token_id, sampling.logprobs)]
            outputs.logprobs.append(SequenceLogprobs(sequence.sequence_id, positions))
        end = sequence.end(token_id)
        if end is not None:
            outputs.ends.append(end)
            del self._sequences[sequence.sequence_id]

    def _pool(self, sequence: FakeSequence, outputs: EngineOutputs) -> None:
        request = sequence.request
        outputs.starts.append(SequenceStart(sequence.sequence_id, sequence.num_cached_tokens))
        values = vector_of(request.prompt_token_ids, request.pooling)
        outputs.vectors.append(SequenceVector(sequence.sequence_id, values.tobytes()))
        outputs.ends.append(SequenceEnd(sequence.sequence_id, "stop"))
        del self._sequences[sequence.sequence_id]

    def _fail(self, sequence: FakeSequence, error: str, outputs: EngineOutputs) -> None:
        if not sequence.token_ids:
            # it had begun: a request that never does is one that was refused
            outputs.starts.append(SequenceStart(sequence.sequence_id, sequence.num_cached_tokens))
        outputs.ends.append(SequenceEnd(sequence.sequence_id, "error", error=error))
        del self._sequences[sequence.sequence_id]

    def _logprobs(self, token_id: int, count: int, logprob: float = -0.5) -> TokenLogprobs:
        """The chosen token, which is the best; then its neighbours in the vocabulary."""
        best = [(token_id + rank) % self._vocab_size for rank in range(count)]
        return TokenLogprobs(
            [token_id, *best], [logprob, *(logprob - rank for rank in range(count))], [1, *range(1, count + 1)]
        )

    def _hold(self, at: int | None = None) -> None:
        """Every sequence stands still at so many tokens, so that a test can act in between; None lets them go on."""
        self.hold_at = math.inf if at is None else at

    def _await_arrival(self) -> None:
        """The step after the next one is as long as it takes until something arrives."""
        self._num_steps_to_await = 2

    def _look_for_arrivals(self) -> None:
        if self._arrivals < 0:
            return
        self._num_steps_to_await -= 1
        if self._num_steps_to_await == 0:
            self.came_in_step = bool(select.select([self._arrivals], [], [], _LONGEST_STEP)[0])

    def _fail_next_step(self) -> None:
        self._fails_next_step = True

    def _interrupt_next_step(self) -> None:
        """Somebody presses Ctrl-C in the middle of it."""
        self._interrupts_next_step = True

    def _fail_at(self, num_tokens: int, error: str) -> None:
        """Each sequence that has so many tokens ends with an error."""
        self.failures[num_tokens] = error

    def _fail_requests(self, error: str) -> None:
        """Every open sequence ends with an error, as after a failure that was traced to its request."""
        for sequence_id in [*self._sequences, *(one for beams in self._beams.values() for one in beams.sequence_ids)]:
            self._events.ends.append(SequenceEnd(sequence_id, "error", error=error))
        self._sequences.clear()
        self._beams.clear()
