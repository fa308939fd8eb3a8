"""A step as a sum over what it does: the simplest model, and enough where one device was measured."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine_core.executor.modelled import Amount, StepWork


@dataclass(frozen=True)
class LinearCosts:
    """Seconds of each unit of work."""

    per_step: float = 1e-3
    per_token: float = 1e-5
    # of context that a row reads, once a row and step
    per_context_token: float = 0.0
    # of a query and a key, over all layers
    per_pair: float = 0.0
    per_swapped_block: float = 1e-4
    per_copied_block: float = 1e-5
    per_draft_pass: float = 0.0

    def seconds(self, work: StepWork) -> Amount:
        fixed = (
            self.per_step
            + self.per_token * work.num_tokens
            + self.per_swapped_block * work.num_swapped_blocks
            + self.per_copied_block * work.num_copied_blocks
            + self.per_draft_pass * work.num_draft_passes
        )
        return fixed + self.per_context_token * work.context_tokens + self.per_pair * work.attention_pairs
