"""Where the memory of a device goes before there is a KV cache: what a worker measures at its start (4.1), calculated.

    memory of the device x gpu_memory_utilization, or what others leave of it if that is less
      - what the runtime takes          driver, libraries, buffers of collectives: of a device sheet, or PROGRAM_BYTES
      - weights of this worker
      - the largest step                max_num_batched_tokens in the model, max_num_seqs rows of logits
      = the KV cache

One share for every model and device: what stays free of it is for other programs and for holes between tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.arithmetic import FLOAT_BYTES, ModelShape
from quire.config.engine_config import EngineConfig
from quire.config.weight_sizes import weight_bytes
from quire.errors import UserError

# logits, and a copy that penalties and samplers change
_COPIES_OF_LOGITS = 2
_LOGIT_BYTES = 4
# on a CPU: Python, torch, the engine itself and what it remembers of its last decisions, before there are weights
PROGRAM_BYTES = 204 << 20


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
    # of the total, what others have not taken; None: all of it
    free: int | None = None

    @property
    def taken(self) -> int:
        """Before there is a KV cache."""
        return self.runtime + self.weights + self.largest_step

    @property
    def left(self) -> int:
        """For the KV cache; below 0: it does not fit."""
        allowed = int(self.total * self.utilization)
        return min(allowed, allowed if self.free is None else self.free) - self.taken


def engine_bytes(config: EngineConfig) -> int:
    """What an engine on a CPU takes in all once its cache is full, before it is loaded; of a model whose config.json
    does not say it, as much as its files hold. The cache has the size that was asked for."""
    worker = config.worker
    try:
        shape = ModelShape.of(config.facts.hf_config)
        weights, _ = weight_bytes(config.facts, shape, worker.dtype, worker.quantization)
        step = LargestStep(config.max_num_batched_tokens, config.max_num_seqs).num_bytes(shape, worker.dtype)
    except UserError:
        weights = config.facts.num_weight_bytes
        step = 0
    return PROGRAM_BYTES + weights + step + (config.kv_cache_memory_bytes or 0)
