"""The simulated executor driven by hand, a message at a time: for tests of the executor itself."""

from __future__ import annotations

from typing import Any

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import NUM_DRAFTS, AdmittedSequence, ForkedSequence, SchedulerOutput, StepOutput, int_array
from quire.sampling_params import SamplingParams
from quire.testing.simulator.executor import SimulatedExecutor


class Messages:
    """Hands steps to an executor: blocks of 4, tables as they are given."""

    def __init__(self, **options: Any) -> None:
        self.executor = SimulatedExecutor([KVGroup(("layer",))], 16, 4, **options)
        self.num_steps = 0

    def step(
        self,
        grants: dict[int, int],
        tables: dict[int, list[int]] | None = None,
        num_drafts: list[int] | None = None,
        **fields: Any,
    ) -> StepOutput:
        self.num_steps += 1
        if num_drafts is not None:
            fields["step_data"] = {NUM_DRAFTS: int_array(num_drafts)}
        writes = [(0, row, i, block) for row, blocks in (tables or {}).items() for i, block in enumerate(blocks)]
        for name in ("swapped_out", "swapped_in", "block_copies"):
            fields[name] = int_array(fields.get(name, [])).reshape(-1, 2).T
        return self.executor.execute(
            SchedulerOutput(
                step=self.num_steps,
                block_writes=int_array(writes).reshape(-1, 4).T,
                rows=int_array(list(grants)),
                num_tokens=int_array(list(grants.values())),
                **fields,
            )
        ).result()


def admitted(row: int, tokens: list[int], **fields: Any) -> AdmittedSequence:
    """Greedy unless `sampling` says otherwise."""
    fields.setdefault("sampling", SamplingParams(temperature=0.0))
    return AdmittedSequence(
        row=row,
        sequence_id=row,
        token_ids=int_array(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=fields.pop("num_computed_tokens", 0),
        seed=0,
        **fields,
    )


def forked(parent: int, row: int, total: int, computed: int) -> ForkedSequence:
    return ForkedSequence(
        parent_row=parent, row=row, sequence_id=row, num_total_tokens=total, num_computed_tokens=computed, seed=1
    )
