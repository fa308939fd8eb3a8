"""Workloads that run out of KV cache, and the machines that they run on. Used by recovery.py."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from traces import SHAREGPT, lengths

from quire.messages import DecodingSpec, EngineRequest
from quire.sampling_params import SamplingParams
from quire.simulation.costs.linear import LinearCosts

VOCAB = 256


@dataclass(frozen=True)
class Machine:
    """Prices of a step's parts, and what fits. To move a block has a price, and each of its tokens adds to it."""

    name: str
    seconds_per_step: float
    seconds_per_token: float
    seconds_per_context_token: float
    seconds_per_moved_block: float
    seconds_per_moved_token: float
    num_slots: int
    max_model_len: int
    budget: int

    def costs(self, block_size: int) -> LinearCosts:
        return LinearCosts(
            per_step=self.seconds_per_step,
            per_token=self.seconds_per_token,
            per_context_token=self.seconds_per_context_token,
            per_swapped_block=self.seconds_per_moved_block + block_size * self.seconds_per_moved_token,
            per_copied_block=0.0,
        )


# Qwen3-0.6B's shape in bfloat16 on two CPU cores, by `python benchmarks/swap_and_recompute.py --threads 2`. At block
# size 16: "recompute" / 512 tokens, and "swap both" / 2 / 32 blocks (1.8 MB each). A step's own part is what a decoding
# step of one row takes.
CPU = Machine(
    "0.6B, 2 cores",
    seconds_per_step=30e-3,
    seconds_per_token=4.4e-3,
    seconds_per_context_token=0.0,
    seconds_per_moved_block=0.0,
    seconds_per_moved_token=0.6e-3 / 16,
    num_slots=4096,
    max_model_len=1024,
    budget=512,
)

# OPT-13B on an A100 (table 3.1: 26 GB of weights, 15.7K slots of 0.8 MB; 1.56 TB/s). Figure 3.19a has about 20 ms for
# recomputing a sequence, and for swapping it out and in about 140 ms with blocks of 1 token, about 30 ms with 256. It
# does not say how long the sequence is. ASSUMED here: 128 tokens, which makes the 20 ms half of the GPU's arithmetic
# (256 tokens would need more than all of it), and swapping a large block 14 GB/s. Then
#   recomputing:  20 ms / 128 tokens                                           = 0.156 ms a token
#   swapping:     2 * 128 * (block + token) = 140 ms,  2 * (block + 256 * token) = 30 ms
#                 -> 0.490 ms a block (80 transfers of 6 us: 40 layers, keys and values) and 0.057 ms a token
# which also has both methods even at blocks of 16 to 64, as 3.7.3 says. A step reads the weights once, and the keys and
# values of the context.
_TOKENS, _RECOMPUTE, _SWAP_1, _SWAP_256 = 128, 20e-3, 140e-3, 30e-3
_MOVED_TOKEN = (_SWAP_256 / 2 - _SWAP_1 / 2 / _TOKENS) / 255
A100 = Machine(
    "OPT-13B, A100",
    seconds_per_step=26e9 / 1.56e12,
    seconds_per_token=_RECOMPUTE / _TOKENS,
    seconds_per_context_token=0.8e6 / 1.56e12,
    seconds_per_moved_block=_SWAP_1 / 2 / _TOKENS - _MOVED_TOKEN,
    seconds_per_moved_token=_MOVED_TOKEN,
    num_slots=15_700,
    max_model_len=2048,
    budget=2048,
)


@dataclass(frozen=True)
class Spec:
    """One request: lengths in tokens, and how many sequences."""

    prompt: int
    output: int
    num_shared: int = 0
    num_samples: int = 1
    beam_width: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests arrive at random moments, `rate` a second on average, or all at once if it is 0."""

    name: str
    machine: Machine
    specs: tuple[Spec, ...]
    rate: float = 0.0
    block_size: int = 16
    # swap space beside the KV cache
    host_share: float = 1.0
    prefix_caching: bool = True

    @property
    def num_blocks(self) -> int:
        return self.machine.num_slots // self.block_size

    @property
    def num_host_blocks(self) -> int:
        return int(self.num_blocks * self.host_share)

    def arrivals(self) -> list[tuple[float, EngineRequest]]:
        """(moment, request), the same in every run."""
        chance = random.Random(7)
        shared = [chance.randrange(VOCAB) for _ in range(self.machine.max_model_len)]
        moment, arrivals = 0.0, []
        for number, spec in enumerate(self.specs):
            own = [chance.randrange(VOCAB) for _ in range(spec.prompt - spec.num_shared)]
            arrivals.append((moment, _request(number, shared[: spec.num_shared] + own, spec)))
            moment += chance.expovariate(self.rate) if self.rate else 0.0
        return arrivals


def _request(number: int, prompt: list[int], spec: Spec) -> EngineRequest:
    width = spec.beam_width
    return EngineRequest(
        request_id=number,
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            n=width or spec.num_samples, max_tokens=spec.output, ignore_eos=True, temperature=0.0 if width else 1.0
        ),
        seed=number,
        decoding=DecodingSpec(method="beam_search", args={"width": width}) if width else None,
    )


# ---------------------------------------------------------------------------------------------- which


def workloads(size: float = 1.0) -> list[Workload]:
    """`size` scales the number of requests, and the KV cache with it as far as the longest request allows."""
    small, large = (_with_share(machine, size) for machine in (CPU, A100))

    def chat(count: int, greatest: int) -> tuple[Spec, ...]:
        return tuple(Spec(*pair) for pair in lengths(SHAREGPT, max(8, round(size * count)), greatest))

    def between(count: int, prompts: tuple[int, int], outputs: tuple[int, int], **further: int) -> tuple[Spec, ...]:
        chance = random.Random(5)
        return tuple(
            Spec(chance.randint(*prompts), chance.randint(*outputs), **further)
            for _ in range(max(8, round(size * count)))
        )

    half_shared = between(75, (1060, 1200), (200, 600), num_shared=1024) + between(75, (100, 1200), (200, 600))
    return [
        Workload("chat", small, chat(60, 1024)),
        Workload("chat, swap space of 1/16", small, chat(60, 1024), host_share=1 / 16),
        Workload("parallel sampling, n=6", small, between(16, (50, 300), (50, 200), num_samples=6)),
        Workload("shared prefix of 640", small, between(60, (660, 700), (100, 300), num_shared=640)),
        Workload("chat", large, chat(200, 2048), rate=4.0),
        Workload("chat, blocks of 1", large, chat(100, 2048), block_size=1),
        Workload("chat, blocks of 64", large, chat(200, 2048), block_size=64),
        Workload("the same, no prefix cache", large, chat(200, 2048), block_size=64, prefix_caching=False),
        Workload("long prompts, short outputs", large, between(100, (800, 1600), (20, 100))),
        Workload("short prompts, long outputs", large, between(100, (20, 100), (400, 1200))),
        Workload("the same, blocks of 128", large, between(100, (20, 100), (400, 1200)), block_size=128),
        Workload("parallel sampling, n=6", large, between(40, (100, 600), (100, 400), num_samples=6)),
        Workload("beams of width 4", large, between(40, (100, 600), (100, 400), beam_width=4)),
        Workload("shared prefix of 1,024", large, between(150, (1060, 1200), (200, 600), num_shared=1024)),
        Workload("half share it, blocks of 64", large, tuple(random.Random(6).sample(half_shared, len(half_shared))),
                 block_size=64),
    ]  # fmt: skip


def _with_share(machine: Machine, size: float) -> Machine:
    return replace(machine, num_slots=max(machine.max_model_len, round(machine.num_slots * min(1.0, size))))


def named(all_workloads: Iterable[Workload], part: str) -> list[Workload]:
    return [workload for workload in all_workloads if part in f"{workload.machine.name}: {workload.name}"]
