"""A core that answers at once and costs next to nothing: for measuring and loading what stands in front of a core.

Every running sequence gets a token in every step. Its tokens follow from its prompt and its seed alone (`answer`), so
whoever loads a server can tell a right answer from a wrong one; so do log-probabilities, where they are asked for
(`logprobs_of`). Forms are welcome, and nobody follows them: a text is what it would be without.
QUIRE_NULL_STEPS_A_SECOND paces it (0: as fast as it can).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.errors import UserError
from quire.messages import (
    AbortRequests,
    CacheChanged,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    IntArray,
    SchedulerOutput,
    SequenceEnd,
    SequenceLogprobs,
    SequenceStart,
    TokenLogprobs,
    sequence_id_of,
)
from quire.observability.step_times import NoStepTimes

PACE = "QUIRE_NULL_STEPS_A_SECOND"
# Tokens [FIRST, FIRST + NUM) are answered with, in turn.
FIRST, NUM = 300, 97
# Not the model's: no model computes here.
MAX_MODEL_LEN = 2**20


def build(config: EngineConfig) -> NullCore:
    """For `open_link(config, core="tests.support.null_core:build")`."""
    return NullCore(config, float(os.environ.get(PACE, "0")))


def answer(prompt_token_ids: list[int], seed: int, index: int, num_tokens: int) -> list[int]:
    """What sequence `index` of a request says."""
    start = _start_of(prompt_token_ids, seed, index)
    return [FIRST + (start + position) % NUM for position in range(num_tokens)]


def _start_of(prompt_token_ids: list[int], seed: int, index: int) -> int:
    return (sum(prompt_token_ids) + len(prompt_token_ids) + seed + 31 * index) % NUM


def logprobs_of(token_id: int, num_best: int) -> TokenLogprobs:
    """As if the answer were the most probable token each time, and those after it in the cycle the next ones."""
    ranks = list(range(1, max(1, num_best) + 1))
    others = [FIRST + (token_id - FIRST + rank) % NUM for rank in ranks[:-1]]
    return TokenLogprobs([token_id, *others], [-rank / (1 + token_id % 7) for rank in ranks], ranks)


class NullCore:
    """Rows of running sequences in arrays; Python touches those that start and end."""

    times = NoStepTimes()

    def __init__(self, config: EngineConfig, steps_a_second: float) -> None:
        self.ready = EngineReady(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=config.max_num_seqs,
            num_blocks=2**20,
            block_size=config.block_size,
            report=["a core that answers at once"],
        )
        self._pause = 1 / steps_a_second if steps_a_second else 0.0
        self._due = 0.0
        self._num_steps = 0
        self._ends: list[SequenceEnd] = []
        self._starts: list[SequenceStart] = []
        # columns: sequence id, where in the cycle, tokens left
        self._rows: IntArray = np.empty((3, 0), dtype=np.int64)
        # those that wait for a row
        self._new: list[tuple[int, int, int]] = []
        # sequence id -> so many log-probabilities a token
        self._num_best: dict[int, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._rows.shape[1] or self._new or self._ends)

    def add(self, request: EngineRequest) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        room = self.ready.max_model_len - len(prompt)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        for index in range(sampling.n):
            sequence_id = sequence_id_of(request.request_id, index)
            self._new.append((sequence_id, _start_of(prompt, sampling.seed or 0, index), max(1, limit)))
            if sampling.logprobs is not None:
                self._num_best[sequence_id] = sampling.logprobs

    def extend(self, extension: ExtendRequest) -> None:
        raise UserError("this core takes whole prompts only.")

    def abort(self, aborts: AbortRequests) -> None:
        ids = self._rows[0]
        gone = np.isin(ids, aborts.sequence_ids)
        gone |= np.isin(ids >> _shift(), aborts.request_ids)
        self._ends += [SequenceEnd(int(sequence_id), "abort") for sequence_id in ids[gone]]
        self._rows = self._rows[:, ~gone]
        for waiting in self._new.copy():
            if waiting[0] in aborts.sequence_ids or waiting[0] >> _shift() in aborts.request_ids:
                self._new.remove(waiting)
                self._ends.append(SequenceEnd(waiting[0], "abort"))

    def fail(self, request_id: int, reason: str, num_outputs: int = 0) -> None:
        is_its_own = self._rows[0] >> _shift() == request_id
        ids = [*self._rows[0][is_its_own].tolist(), *(one[0] for one in self._new if one[0] >> _shift() == request_id)]
        self._rows = self._rows[:, ~is_its_own]
        self._new = [one for one in self._new if one[0] not in ids]
        ids = ids or [sequence_id_of(request_id, index) for index in range(num_outputs)]
        self._ends += [SequenceEnd(sequence_id, "error", error=reason) for sequence_id in ids]

    def control(self, name: str, args: dict[str, Any]) -> Any:
        match name:
            case "statistics":
                return {"num_requests_running": self._rows.shape[1] + len(self._new), "num_steps": self._num_steps}
            case "worker.open_vocabulary" | "worker.statistics":
                return {}
            case "worker.prepare_form":
                return True
        raise UserError(f"control {name!r}: there is no such operation.")

    def step(self) -> EngineOutputs:
        self._wait()
        self._num_steps += 1
        self._take_new()
        ids, where, left = self._rows
        outputs = EngineOutputs(step=self._num_steps, sequence_ids=ids, token_ids=FIRST + where % NUM)
        outputs.starts, self._starts = self._starts, []
        if self._num_best:
            outputs.logprobs = self._logprobs(outputs)
        where += 1
        left -= 1
        outputs.ends, self._ends = self._ends, []
        if not left.all():
            outputs.ends += [SequenceEnd(int(sequence_id), "length") for sequence_id in ids[left == 0]]
            self._rows = self._rows[:, left > 0]
        for end in outputs.ends if self._num_best else ():
            self._num_best.pop(end.sequence_id, None)
        return outputs

    def watch_steps(self, on_step: Callable[[SchedulerOutput, int], None]) -> None: ...

    def watch_arrivals(self, descriptor: int) -> None: ...

    def watch_cache(self, tell: Callable[[CacheChanged], None]) -> None: ...

    def held_in_cache(self) -> CacheChanged | None:
        return None

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None: ...

    def tend(self, now: float) -> float | None:
        return None

    def shutdown(self) -> None:
        self._rows = self._rows[:, :0]

    def _logprobs(self, outputs: EngineOutputs) -> list[SequenceLogprobs]:
        tokens = zip(outputs.sequence_ids.tolist(), outputs.token_ids.tolist(), strict=True)
        return [
            SequenceLogprobs(sequence_id, [logprobs_of(token_id, self._num_best[sequence_id])])
            for sequence_id, token_id in tokens
            if sequence_id in self._num_best
        ]

    def _take_new(self) -> None:
        taken = self._new[: max(0, self.ready.max_num_seqs - self._rows.shape[1])]
        if taken:
            del self._new[: len(taken)]
            self._starts += [SequenceStart(sequence_id, 0) for sequence_id, _, _ in taken]
            self._rows = np.concatenate([self._rows, np.array(taken, dtype=np.int64).T], axis=1)

    def _wait(self) -> None:
        if self._pause:
            now = time.monotonic()
            self._due = max(self._due + self._pause, now - 8 * self._pause)
            time.sleep(max(0.0, self._due - now))


def _shift() -> int:
    """Bits of a sequence's index inside its number."""
    return sequence_id_of(1, 0).bit_length() - 1
