"""A step at start, so that a mistake in a recurrent layer ends the start and not the first request.

When memory is measured there are no states, so recurrent layers have not run when the cache is there. A row computes
two tokens in blocks that nobody has yet, and leaves nothing behind: at position 0 a state is zeros, whatever lies
there.
"""

from __future__ import annotations

import numpy as np

from quire.errors import ModelError
from quire.messages import AdmittedSequence, SchedulerOutput, int_array
from quire.sampling_params import SamplingParams
from quire.worker.model_runner import ModelRunner


def try_step(runner: ModelRunner, num_tokens: int, num_groups: int, num_state_blocks: int) -> None:
    """The last group is that of states."""
    # each group a block of its own for its tokens, then those of the state
    writes = [(group, 0, 0, group) for group in range(num_groups - 1)]
    writes += [(num_groups - 1, 0, index, num_groups - 1 + index) for index in range(num_state_blocks)]
    row = AdmittedSequence(
        row=0,
        sequence_id=0,
        token_ids=int_array([0] * num_tokens),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
    )
    output = runner.step(
        SchedulerOutput(
            step=0,
            admitted=[row],
            block_writes=np.ascontiguousarray(int_array(writes).T),
            rows=int_array([0]),
            num_tokens=int_array([num_tokens]),
        )
    )
    runner.step(SchedulerOutput(step=0, released=[0]))
    if output.failures:
        raise ModelError(
            f"a step of {num_tokens} tokens failed when the model was tried: {output.failures[0]} Most likely a layer "
            "that keeps a state has another shape than what it is given. Mend the model's file, or take the "
            "config.json that belongs to the weights."
        )
