"""One step of the model: apply what changed, gather the inputs, run the model, sample.

Owns the order of a step. Must never name a feature: what differs between requests lives in the row table, in the
sampler and its processors, or in the attention backend. If the model raises, nothing is counted as computed: the core
may repeat the step with fewer rows (and without the differences, which are applied). Called by Worker.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.messages import SchedulerOutput, StepOutput
from quire.worker.attention import AttentionBackend
from quire.worker.forward_context import ForwardContext, forward_context
from quire.worker.input_batch import BatchBuilder, InputBatch
from quire.worker.kv_cache import KVCache
from quire.worker.row_table import RowTable
from quire.worker.sampler.sampler import Sampler


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
    ) -> None:
        self.model = model
        self.backend = backend
        self.table = table
        self.cache = cache
        self.sampler = sampler
        self.batches = batches

    @torch.inference_mode()
    def step(self, scheduled: SchedulerOutput) -> StepOutput:
        self._apply(scheduled)
        if len(scheduled.rows) == 0:
            return StepOutput(step=scheduled.step)
        batch = self.batches.build(scheduled.rows, scheduled.num_tokens)
        hidden_TE = self._forward(batch)
        sampled = self.sampler.sample(hidden_TE, batch)
        self.table.advance(batch.rows_S, batch.num_tokens_S)
        self.table.append(sampled.rows, sampled.token_ids)
        return StepOutput(
            step=scheduled.step,
            rows=sampled.rows,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            candidates=sampled.candidates,
            failures=sampled.failures,
        )

    def _apply(self, scheduled: SchedulerOutput) -> None:
        """The differences, in the order of the message's fields."""
        for fork in scheduled.forked:
            self.table.fork(fork)
            self.sampler.fork(fork)
        for row in scheduled.released:
            self.table.release(row)
            self.sampler.release(row)
        for sequence in scheduled.admitted:
            self.table.admit(sequence)
            self.sampler.admit(sequence)
        self.table.set_progress(scheduled.progress)
        for appended in scheduled.appended:
            self.table.extend(appended)
        self.table.write_blocks(scheduled.block_writes)
        self.cache.swap(scheduled.swapped_out, scheduled.swapped_in)
        self.cache.copy_blocks(scheduled.block_copies)

    def _forward(self, batch: InputBatch) -> Tensor:
        metadata: tuple[Any, ...] = ()
        if self.backend is not None:
            metadata = tuple(self.backend.build_metadata(group) for group in batch.attention)
        with forward_context(ForwardContext(metadata)):
            return self.model(batch.input_ids_T, batch.positions_T)
