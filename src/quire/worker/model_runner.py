"""One step of the model: apply what changed, then compute the rows behind a wall each.

Owns the order of a step. Must never name a feature: what differs between requests lives in the row table and in those
who follow its rows (the sampler with its processors and readers, the proposer of drafts), and what happens beside the
model in those who take part in each step. The differences are applied once, whatever becomes of the step. Called by
Worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any

import torch

from quire.errors import UserError
from quire.messages import SchedulerOutput, StepOutput
from quire.worker.kv_cache import KVCache
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors import RowFollower
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember, having

STRANGE_TOKEN = "it has a token id that is not in the model's vocabulary."
logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps over the rows of one model."""

    def __init__(
        self,
        table: RowTable,
        cache: KVCache,
        isolation: StepIsolation,
        followers: Sequence[RowFollower],
        members: Sequence[StepMember],
    ) -> None:
        """A follower's exception about a row fails that row alone."""
        self.table = table
        self.cache = cache
        self.isolation = isolation
        self._followers = tuple(followers)
        # those that do something at each place of a step
        self._beginning = having("begin", members)
        self._preparing = having("prepare", members)
        self._leaving_out = having("without_waiting", members)
        self._ending = having("end", members)
        self._closing = having("close", members)

    def close(self) -> None:
        for member in self._closing:
            member.close()
        self.isolation.close()

    @torch.inference_mode()
    def step(self, scheduled: SchedulerOutput) -> StepOutput:
        times = self.isolation.computation.times
        times.begin()
        for member in self._beginning:
            member.begin()
        self.isolation.open(scheduled)
        failures = self._apply(scheduled)
        for member in self._preparing:
            failures |= member.prepare(scheduled)
        rows, num_tokens = self.table.granted(scheduled.rows, scheduled.num_tokens)
        for member in self._leaving_out:
            rows, num_tokens = member.without_waiting(rows, num_tokens)
        self.cache.copies.before_step(scheduled.rows)
        output = self.isolation.run(scheduled, rows, num_tokens)
        output.failures |= failures
        for member in self._ending:
            member.end(scheduled, output)
        times.ends("finish")
        return output

    def _apply(self, scheduled: SchedulerOutput) -> dict[int, str]:
        """The differences, in the order of the message's fields. Rows that could not be made ready, with the reason."""
        failures: dict[int, str] = {}
        for fork in scheduled.forked:
            self.table.fork(fork)
            self.cache.copies.forked(fork.parent_row, fork.row)
            self._make_ready(fork.row, methodcaller("fork", fork), failures)
        for row in scheduled.released:
            self.table.release(row)
            self._release(row)
            # forked and let go in one step: the core waits for nothing of it, and would forget its cache over a failure
            failures.pop(row, None)
        for sequence in scheduled.admitted:
            self.table.admit(sequence)
            self._make_ready(sequence.row, methodcaller("admit", sequence), failures)
        self.table.set_progress(scheduled.progress)
        for appended in scheduled.appended:
            self.table.extend(appended)
        self.table.write_blocks(scheduled.block_writes)
        if scheduled.swapped_out.size or scheduled.swapped_in.size:
            self.cache.swap(scheduled.swapped_out, scheduled.swapped_in)
        _, rows, _, blocks = scheduled.block_writes
        self.cache.copies.came(rows, blocks)
        if scheduled.block_copies.size:
            self.cache.copy_blocks(scheduled.block_copies)
        # The core has looked at them before; nothing below does.
        arrived = {one.row for one in scheduled.admitted} | {one.row for one in scheduled.appended}
        for row in arrived - failures.keys():
            if self.table.clears_strange_tokens(row):
                failures[row] = STRANGE_TOKEN
        for row in failures:
            self.isolation.fail(row)
        return failures

    def _make_ready(self, row: int, tell: Callable[[RowFollower], Any], failures: dict[int, str]) -> None:
        """What a request asks for is looked at here for the first time; what it breaks is its own row."""
        failures.pop(row, None)
        try:
            for follower in self._followers:
                tell(follower)
        except Exception as error:
            logger.exception("row %d could not be made ready", row)
            self._release(row)
            in_short = f"it could not be made ready ({type(error).__name__}); the engine's log says more."
            failures[row] = str(error) if isinstance(error, UserError) else in_short

    def _release(self, row: int) -> None:
        for follower in self._followers:
            follower.release(row)
