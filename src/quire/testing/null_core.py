"""A core that answers at once and costs next to nothing: for measuring and loading what stands in front of a core.

Every running sequence gets a token in every step. Its tokens follow from its prompt and its seed alone (`answer`), so
whoever loads a server can tell a right answer from a wrong one. QUIRE_NULL_STEPS_A_SECOND paces it (0: as fast as it
can).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.errors import UserError
from quire.messages import (
    AbortRequests,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    ExtendRequest,
    IntArray,
    SequenceEnd,
    SequenceStart,
    sequence_id_of,
)

PACE = "QUIRE_NULL_STEPS_A_SECOND"
# Tokens [FIRST, FIRST + NUM) are answered with, in turn.
FIRST, NUM = 300, 97
# Not the model's: no model computes here.
MAX_MODEL_LEN = 2**20


def build(config: EngineConfig) -> NullCore:
    """For `open_link(config, core="quire.testing.null_core:build")`."""
    return NullCore(config, float(os.environ.get(PACE, "0")))


def answer(prompt_token_ids: list[int], seed: int, index: int, num_tokens: int) -> list[int]:
    """What sequence `index` of a request says."""
    start = _start_of(prompt_token_ids, seed, index)
    return [FIRST + (start + position) % NUM for position in range(num_tokens)]


def _start_of(prompt_token_ids: list[int], seed: int, index: int) -> int:
    return (sum(prompt_token_ids) + len(prompt_token_ids) + seed + 31 * index) % NUM


class NullCore:
    """Rows of running sequences in arrays; Python touches those that start and end."""

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
        if name == "statistics":
            return {"num_requests_running": self._rows.shape[1] + len(self._new), "num_steps": self._num_steps}
        raise UserError(f"control {name!r}: there is no such operation.")

    def step(self) -> EngineOutputs:
        self._wait()
        self._num_steps += 1
        self._take_new()
        ids, where, left = self._rows
        outputs = EngineOutputs(step=self._num_steps, sequence_ids=ids, token_ids=FIRST + where % NUM)
        outputs.starts, self._starts = self._starts, []
        where += 1
        left -= 1
        outputs.ends, self._ends = self._ends, []
        if not left.all():
            outputs.ends += [SequenceEnd(int(sequence_id), "length") for sequence_id in ids[left == 0]]
            self._rows = self._rows[:, left > 0]
        return outputs

    def shutdown(self) -> None:
        self._rows = self._rows[:, :0]

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
