"""Where the memory of a device goes before there is a KV cache: what a worker measures at its start (4.1), calculated.

    memory of the device x gpu_memory_utilization
      - what the runtime takes          driver, libraries, buffers of collectives: of a device sheet, else 0
      - weights of this worker
      - the largest step                max_num_batched_tokens in the model, max_num_seqs rows of logits
      = the KV cache

One share for every model and device: what stays free of it is for other programs and for holes between tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.arithmetic import FLOAT_BYTES, ModelShape

# logits, and a copy that penalties and samplers change
_COPIES_OF_LOGITS = 2
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class LargestStep:
    """What the options allow a step to be."""

    num_tokens: int
    num_rows: int

    def num_bytes(self, shape: ModelShape, dtype: str) -> int:
        """Of a worker whose part of the model this shape is. Hidden states of all tokens are there throughout; beside
        them stands either what the widest layer makes of them, or the logits of all rows."""
        hidden = self.num_tokens * shape.hidden_size * FLOAT_BYTES[dtype]
        layer = self.num_tokens * _widest_layer(shape) * FLOAT_BYTES[dtype]
        num_rows = min(self.num_rows, self.num_tokens)
        logits = _COPIES_OF_LOGITS * num_rows * shape.vocab_size * _LOGIT_BYTES
        # the residual stream, and what its norm makes of it
        return max(2 * hidden + layer, hidden + logits)


def _widest_layer(shape: ModelShape) -> int:
    """Numbers of a token, most of them at once."""
    width = (2 if shape.has_gated_mlp else 1) + 1
    inner = shape.intermediate_size
    experts = shape.experts
    if experts is not None:
        # each token goes to so many experts, and comes back from each
        of_experts = experts.top_k * (width * experts.inner_size + shape.hidden_size) + width * experts.shared_size
        return max(of_experts, _attention_width(shape), width * inner)
    return max(_attention_width(shape), width * inner)


def _attention_width(shape: ModelShape) -> int:
    """Queries, keys, values, and what attention makes of them."""
    return 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim


@dataclass(frozen=True)
class MemoryBudget:
    """Of one worker, in bytes."""

    total: int
    utilization: float
    runtime: int
    weights: int
    largest_step: int

    @property
    def left(self) -> int:
        """For the KV cache; below 0: it does not fit."""
        return int(self.total * self.utilization) - self.runtime - self.weights - self.largest_step
