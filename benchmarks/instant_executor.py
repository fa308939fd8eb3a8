"""An executor that answers at once: what is left of a step's time is the engine's own (DESIGN: the hot path).

Every row that has computed all it has samples the same token. It keeps the two numbers of each row as a worker would,
and nothing else: no blocks, no contents. `benchmarks/engine_overhead.py` measures with it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np

from quire.errors import UserError
from quire.messages import SchedulerOutput, StepOutput, WorkerCapacity

TOKEN = 7


class InstantExecutor:
    """Rows of one engine core; forks are not followed, because every row samples the same token."""

    def __init__(self, num_rows: int, token: int = TOKEN) -> None:
        self._token = token
        self._num_computed = np.zeros(num_rows, dtype=np.int64)
        self._num_total = np.zeros(num_rows, dtype=np.int64)
        self._tokens = np.full(num_rows, token, dtype=np.int64)

    def execute(self, output: SchedulerOutput) -> Future[StepOutput]:
        for sequence in output.admitted:
            self._num_computed[sequence.row] = sequence.num_computed_tokens
            self._num_total[sequence.row] = len(sequence.token_ids)
        for row, num_computed in output.progress:
            self._num_computed[row] = num_computed
        rows = output.rows
        computed = self._num_computed[rows] + output.num_tokens
        self._num_computed[rows] = computed
        is_done = computed == self._num_total[rows]
        if not is_done.all():
            rows = rows[is_done]
        self._num_total[rows] += 1
        future: Future[StepOutput] = Future()
        future.set_result(StepOutput(step=output.step, rows=rows, token_ids=self._tokens[: len(rows)]))
        return future

    def measure_capacity(self) -> WorkerCapacity:
        return WorkerCapacity(layers=[], available_bytes=0, explanation="answers at once")

    def initialize_cache(self, groups: list[list[str]], num_blocks: int, num_host_blocks: int = 0) -> None:
        """There is no cache."""

    def control(self, name: str, args: dict[str, Any]) -> Any:
        raise UserError(f"control {name!r}: this executor has no worker.")

    def loss_descriptors(self) -> tuple[int, ...]:
        return ()

    def check_workers(self) -> None: ...

    def shutdown(self) -> None:
        """There is nothing to give back."""
