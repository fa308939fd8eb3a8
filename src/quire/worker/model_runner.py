"""One step of the model: apply what changed, gather the inputs, run the model, sample.

Owns the order of a step. Must never name a feature: what differs between requests lives in the row table, in the
sampler and its processors, in the proposer of drafts, or in the attention backend. If the model raises, nothing is
counted as computed: the core may repeat the step with fewer rows (and without the differences, which are applied).
Called by Worker.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.kv_connectors.connector import STEP_DATA, StepTransfers, WorkerHalf
from quire.messages import SchedulerOutput, StepOutput, int_array
from quire.worker.attention import AttentionBackend
from quire.worker.input_batch import BatchBuilder, attention_context
from quire.worker.kv_cache import KVCache
from quire.worker.row_table import RowTable
from quire.worker.sampler.sampler import Sampler
from quire.worker.speculative import Drafting

_NOTHING = StepTransfers()


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
    ) -> None:
        self.model = model
        self.backend = backend
        self.table = table
        self.cache = cache
        self.sampler = sampler
        self.batches = batches
        self.drafting = drafting
        self.connector = connector

    @torch.inference_mode()
    def step(self, scheduled: SchedulerOutput) -> StepOutput:
        self._apply(scheduled)
        transfers: StepTransfers = scheduled.step_data.get(STEP_DATA, _NOTHING)
        self.connector.load(transfers.loads)
        rows, num_tokens = self.table.granted(scheduled.rows, scheduled.num_tokens)
        if len(rows) == 0:
            return StepOutput(step=scheduled.step, speculated=self.drafting.report(scheduled))
        batch = self.batches.build(rows, num_tokens)
        with attention_context(batch, self.backend):
            hidden_TE = self.model(batch.input_ids_T, batch.positions_T)
        sampled = self.sampler.sample(hidden_TE, batch)
        self.table.advance(batch.rows_S, batch.num_tokens_S)
        self.table.append(sampled.rows, sampled.lengths, sampled.token_ids)
        if sampled.failures:
            self.table.drop_drafts(int_array(list(sampled.failures)))
        speculated = self.drafting.end_step(scheduled, batch, hidden_TE, sampled.rows)
        self.connector.store([store for store in transfers.stores if store.row not in sampled.failures])
        return StepOutput(
            step=scheduled.step,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            candidates=sampled.candidates,
            failures=sampled.failures,
            speculated=speculated,
        )

    def _apply(self, scheduled: SchedulerOutput) -> None:
        """The differences, in the order of the message's fields."""
        for fork in scheduled.forked:
            self.table.fork(fork)
            self.sampler.fork(fork)
            self.drafting.fork(fork)
        for row in scheduled.released:
            self.table.release(row)
            self.sampler.release(row)
            self.drafting.release(row)
        for sequence in scheduled.admitted:
            self.table.admit(sequence)
            self.sampler.admit(sequence)
            self.drafting.admit(sequence)
        self.table.set_progress(scheduled.progress)
        self.drafting.set_progress(scheduled.progress)
        for appended in scheduled.appended:
            self.table.extend(appended)
        self.table.write_blocks(scheduled.block_writes)
        self.cache.swap(scheduled.swapped_out, scheduled.swapped_in)
        self.cache.copy_blocks(scheduled.block_copies)
