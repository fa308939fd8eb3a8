"""One step of the model: apply what changed, gather the inputs, run the model, sample.

Owns the order of a step. Must never name a feature: what differs between requests lives in the row table, in the
sampler and its processors, in the proposer of drafts, or in the attention backend. If something raises before `commit`,
nothing is counted as computed, and StepIsolation runs the same rows in parts; the differences are applied by then,
once. Called by Worker.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.failpoints import failpoint
from quire.kv_connectors.connector import STEP_DATA, StepTransfers, WorkerHalf
from quire.messages import IntArray, SchedulerOutput, StepOutput, int_array
from quire.worker.attention import AttentionBackend
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.input_batch import BatchBuilder, InputBatch, attention_context
from quire.worker.kv_cache import KVCache
from quire.worker.patience import Patience, Watch
from quire.worker.platforms import Platform
from quire.worker.row_table import RowTable
from quire.worker.sampler.sampler import Sampled, Sampler
from quire.worker.speculative import Drafting
from quire.worker.step_isolation import NotSampledError, StepIsolation
from quire.worker.transfers import Transfers

_NOTHING = StepTransfers()
STRANGE_TOKEN = "it has a token id that is not in the model's vocabulary."
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Computed:
    """What a step computed, before any of it counts."""

    batch: InputBatch
    hidden_TE: Tensor
    sampled: Sampled


class ModelRunner:
    """Runs steps over the rows of one model."""

    def __init__(
        self,
        model: nn.Module,
        backend: AttentionBackend | None,
        table: RowTable,
        cache: KVCache,
        sampler: Sampler,
        batches: BatchBuilder,
        drafting: Drafting,
        connector: WorkerHalf,
        platform: Platform,
        patience: Patience,
    ) -> None:
        self.model = model
        self.backend = backend
        self.table = table
        self.cache = cache
        self.sampler = sampler
        self.batches = batches
        self.drafting = drafting
        self.transfers = Transfers(connector)
        self.platform = platform
        self.watch = Watch()
        # a reference back would keep the caches of a runner that is gone until the collector comes
        self.isolation = StepIsolation(weakref.proxy(self), table, platform, batches.block_size, patience, self.watch)

    def close(self) -> None:
        self.sampler.beside.close()
        self.watch.close()

    @torch.inference_mode()
    def step(self, scheduled: SchedulerOutput) -> StepOutput:
        self.sampler.beside.begin()
        self.isolation.open(scheduled)
        failures = self._apply(scheduled)
        moves: StepTransfers = scheduled.step_data.get(STEP_DATA, _NOTHING)
        failures |= self.transfers.load(moves.loads, self.isolation)
        rows, num_tokens = self._without_late(*self.table.granted(scheduled.rows, scheduled.num_tokens))
        if len(rows):
            output = self.isolation.run(scheduled, rows, num_tokens)
        else:
            output = StepOutput(step=scheduled.step, speculated=self.report(scheduled))
        output.failures |= failures
        self.transfers.store(moves.stores, output, self.isolation)
        self.sampler.beside.end()
        return output

    def compute(self, rows: IntArray, num_tokens: IntArray) -> Computed:
        """These tokens of these rows, and what follows them. Changes nothing but the cache."""
        batch = self.batches.build(rows, num_tokens)
        failpoint("in_forward", batch.input_ids_T)
        with attention_context(batch, self.backend):
            hidden_TE = self.model(batch.input_ids_T, batch.positions_T)
        try:
            failpoint("before_sample", lambda: np.concatenate([self.table.tokens_of(row) for row in rows]))
            return Computed(batch, hidden_TE, self.sampler.sample(hidden_TE, batch))
        except Exception as error:
            raise NotSampledError from error

    def commit(self, scheduled: SchedulerOutput, computed: Computed) -> StepOutput:
        """The two numbers move, and what was sampled stands in the table."""
        batch = computed.batch
        sampled = computed.sampled
        self.table.advance(batch.rows_S, batch.num_tokens_S)
        self.table.append(sampled.rows, sampled.lengths, sampled.token_ids)
        if sampled.failures:
            self.table.drop_drafts(int_array(list(sampled.failures)))
        if len(sampled.late):
            self.table.step_back(sampled.late)
        speculated = self.drafting.end_step(
            scheduled, batch, computed.hidden_TE, sampled.rows, self.sampler.beside.late
        )
        return StepOutput(
            step=scheduled.step,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            candidates=sampled.candidates,
            vectors=sampled.vectors,
            failures=sampled.failures,
            blamed=sampled.blamed if sampled.failures else [],
            speculated=speculated,
            counts=sampled.counts,
        )

    def report(self, scheduled: SchedulerOutput) -> IntArray:
        """Where rows stand that computed nothing."""
        return self.drafting.report(scheduled, self.sampler.beside.late)

    def check_model(self) -> None:
        """One token beside all rows and without a cache; raises if not even this can be computed."""
        failpoint("in_forward")
        token = torch.zeros(1, dtype=torch.int64, device=self.platform.device)
        with forward_context(profiling_context()):
            self.model(token, token)
        self.platform.synchronize()

    def _without_late(self, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Those whose next token waits for work that is done beside the steps compute nothing before it is done."""
        is_next = self.table.num_total[rows] - self.table.num_computed[rows] == 1
        is_out = self.sampler.beside.leave_out(rows, is_next)
        return (rows[~is_out], num_tokens[~is_out]) if is_out.any() else (rows, num_tokens)

    def _apply(self, scheduled: SchedulerOutput) -> dict[int, str]:
        """The differences, in the order of the message's fields. Rows that could not be made ready, with the reason."""
        failures: dict[int, str] = {}
        for fork in scheduled.forked:
            self.table.fork(fork)
            self._tell_followers("fork", fork.row, fork, failures)
        for row in scheduled.released:
            self.table.release(row)
            self.sampler.release(row)
            self.drafting.release(row)
            # forked and let go in one step: the core waits for nothing of it, and would forget its cache over a failure
            failures.pop(row, None)
        for sequence in scheduled.admitted:
            self.table.admit(sequence)
            self._tell_followers("admit", sequence.row, sequence, failures)
        self.table.set_progress(scheduled.progress)
        self.drafting.set_progress(scheduled.progress)
        for appended in scheduled.appended:
            self.table.extend(appended)
        self.table.write_blocks(scheduled.block_writes)
        self.cache.swap(scheduled.swapped_out, scheduled.swapped_in)
        self.cache.copy_blocks(scheduled.block_copies)
        # The core has looked at them before; nothing below does.
        arrived = {one.row for one in scheduled.admitted} | {one.row for one in scheduled.appended}
        for row in arrived - failures.keys():
            if self.table.clears_strange_tokens(row):
                failures[row] = STRANGE_TOKEN
        for row in failures:
            self.isolation.fail(row)
        return failures

    def _tell_followers(self, hook: str, row: int, change: Any, failures: dict[int, str]) -> None:
        """What a request asks for is looked at here for the first time; what it breaks is its own row."""
        failures.pop(row, None)
        try:
            getattr(self.sampler, hook)(change)
            getattr(self.drafting, hook)(change)
        except Exception as error:
            logger.exception("row %d could not be made ready", row)
            self.sampler.release(row)
            self.drafting.release(row)
            failures[row] = f"it could not be made ready ({type(error).__name__}); the engine's log says more."
