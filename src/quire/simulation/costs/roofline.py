"""A step as operators on a device (2.1.1): each takes as long as its arithmetic or its bytes, whichever is longer.

    matrices of the layers   2 x weights x tokens                  weights, once a step
    experts                  2 x weights of those asked x tokens   all that some token of the step asks
    attention                4 x heads x dimension x pairs         keys and values of every row's context
    head                     2 x vocabulary x hidden x rows        its weights
    collectives              two sums a layer where several workers share it, a hand-over between stages
    launches                 so much a layer and a step

Data sheets say peaks; `Efficiency` says which share of them kernels reach. Everything is of the worker that has most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from quire.config.arithmetic import FLOAT_BYTES, ModelShape
from quire.config.device_sheets import DeviceSheet
from quire.engine_core.executor.modelled import Amount, StepWork

_MOST_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet, and what no sheet says. The same for all models and devices."""

    compute: float = 0.65
    attention_compute: float = 0.5
    memory: float = 0.8
    link: float = 0.7
    # launches, and the gaps between kernels
    seconds_per_layer: float = 12e-6
    # input, sampling, results
    seconds_per_step: float = 0.6e-3
    # of a sum over workers, before the first byte
    seconds_per_collective: float = 10e-6
    # between host and device, for swapping
    host_bytes_per_second: float = 20e9


# Of a processor whose rates were measured with its own kernels.
MEASURED = Efficiency(
    compute=1.0, attention_compute=0.5, memory=1.0, link=1.0, seconds_per_layer=20e-6, seconds_per_step=0.4e-3,
    host_bytes_per_second=5e9,
)  # fmt: skip


@dataclass(frozen=True)
class ModelPart:
    """What one worker of several computes: a share of every layer, of all stages together."""

    shape: ModelShape
    dtype: str
    # of all matrices but the looked-up embedding, in the form in which they lie in memory; experts apart
    dense_bytes: float
    expert_bytes: float
    head_bytes: float
    block_bytes: float
    num_ranks: int = 1
    num_stages: int = 1


@dataclass(frozen=True)
class RooflineCosts:
    """Of one model on one device."""

    device: DeviceSheet
    part: ModelPart
    efficiency: Efficiency = field(default_factory=Efficiency)

    def seconds(self, work: StepWork) -> Amount:
        amounts = work.num_tokens, work.num_sampled, work.num_copied_blocks, work.num_swapped_blocks
        fixed = self._fixed.get(amounts)
        if fixed is None:
            fixed = self._matrices(work) + self._collectives(work) + self.seconds_of_blocks(work) + self._launches(work)
            if len(self._fixed) < _MOST_REMEMBERED:
                self._fixed[amounts] = fixed
        return fixed + self._attention(work)

    def swap_seconds(self) -> float:
        """Of a block."""
        return self.part.block_bytes / self.efficiency.host_bytes_per_second

    def move_seconds(self, bytes_per_second: float) -> float:
        """Of a block, over a link with such a rate in its data sheet. Each worker sends its own part."""
        return self.part.block_bytes / (bytes_per_second * self.efficiency.link)

    def seconds_of_blocks(self, work: StepWork) -> float:
        """That a step copies, which are read and written, or swaps."""
        copies = 2.0 * work.num_copied_blocks * self.part.block_bytes / self.device.bytes_per_second
        return copies + work.num_swapped_blocks * self.swap_seconds()

    # ------------------------------------------------------------------------------------------ operators

    def _longer(self, flops: float, num_bytes: float) -> float:
        return max(flops / self._flops, num_bytes / self._bytes_per_second)

    # what does not depend on the step, once; and the price of all but attention, which most steps share with others

    @cached_property
    def _fixed(self) -> dict[tuple[int, ...], float]:
        return {}

    @cached_property
    def _flops(self) -> float:
        return self.device.flops * self.efficiency.compute

    @cached_property
    def _attention_flops(self) -> float:
        return self.device.flops * self.efficiency.attention_compute

    @cached_property
    def _flops_per_pair(self) -> float:
        return 4.0 * self._query_width

    @cached_property
    def _bytes_per_second(self) -> float:
        return self.device.bytes_per_second * self.efficiency.memory

    @cached_property
    def _dense_parameters(self) -> int:
        shape = self.part.shape
        latent = shape.num_key_parameters + shape.num_value_parameters
        return shape.num_linear_parameters + shape.num_float_parameters + latent

    @cached_property
    def _query_width(self) -> int:
        shape = self.part.shape
        if shape.latent is not None:  # queries meet latent vectors
            return shape.num_heads * shape.latent.kept_values
        if shape.mixed is not None:
            return shape.query_width // max(1, shape.num_layers)
        return shape.num_heads * shape.head_dim

    def _matrices(self, work: StepWork) -> float:
        part = self.part
        shape = part.shape
        size = FLOAT_BYTES[part.dtype]
        # each matrix reads its inputs and writes its outputs
        passing = 8 * shape.num_layers * shape.hidden_size * work.num_tokens * size
        seconds = self._longer(2.0 * self._dense_parameters * work.num_tokens, part.dense_bytes + passing)
        experts = shape.experts
        if experts is not None and work.num_tokens:
            flops = 2.0 * shape.num_expert_parameters * experts.top_k / experts.num_experts * work.num_tokens
            seconds += self._longer(flops, experts.share_asked(work.num_tokens) * part.expert_bytes)
        if work.num_sampled:
            flops = 2.0 * shape.vocab_size * shape.hidden_size * work.num_sampled
            # logits are float32, and a sampler looks at them a few times
            seconds += self._longer(flops, part.head_bytes + 16.0 * shape.vocab_size * work.num_sampled)
        return seconds

    def _attention(self, work: StepWork) -> Amount:
        arithmetic = self._flops_per_pair * work.attention_pairs / self._attention_flops
        reading = work.context_bytes / self._bytes_per_second
        longer: Amount = np.maximum(arithmetic, reading)
        return longer

    def _collectives(self, work: StepWork) -> float:
        part = self.part
        num_bytes = work.num_tokens * part.shape.hidden_size * FLOAT_BYTES[part.dtype]
        rate = self.device.link_bytes_per_second * self.efficiency.link
        latency = self.efficiency.seconds_per_collective
        seconds = (part.num_stages - 1) * (latency + num_bytes / rate)
        if part.num_ranks > 1:
            # a ring: everybody sends all but its own part, twice
            share = 2.0 * (part.num_ranks - 1) / part.num_ranks
            seconds += 2 * part.shape.num_layers * (latency + share * num_bytes / rate)
        return seconds

    def _launches(self, work: StepWork) -> float:
        return self.efficiency.seconds_per_step + self.efficiency.seconds_per_layer * self.part.shape.num_layers
