"""How much memory is left for the KV cache: run the largest step, see what it needed, take the rest (4.1).

The largest step has max_num_batched_tokens tokens in the model and max_num_seqs rows of logits in the sampler, all of
which draw with top_p and want log-probabilities: the dearest way. A GPU runs it in full. On a CPU that may take many
seconds, so a small step is run, its live tensors are counted to the byte, and the result is scaled: logits grow in
proportion to tokens and rows. What is drawn out of them is not scaled, because it is drawn slice by slice. On a CPU
attention runs without a cache here: its own memory is that of its output. A GPU has a cache of one block for it, and
block tables of full length, so that the work space of its kernels is seen (`scratch_cache.py`).

The same step tells what computing a token costs, for the choice between computing again and swapping (3.4.5).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from quire.config import WorkerConfig
from quire.config.image_sizes import LargestImage
from quire.messages import LayerSpec, WorkerCapacity
from quire.worker.attention import attention_layers
from quire.worker.compilation.graphs import GraphedModel, StepBuffers, bytes_of_graphs
from quire.worker.forward_context import forward_context, profiling_context
from quire.worker.live_tensors import LiveTensors
from quire.worker.packed_store import num_mapped_bytes
from quire.worker.platforms import MemoryReport, Platform
from quire.worker.sampler.choose import DrawSettings, choose_tokens, rows_in_slice
from quire.worker.sampler.logprobs import LogprobReader
from quire.worker.scratch_cache import scratch_cache
from quire.worker.state_cache import recurrent_layers

_SIZE_ON_CPU = 16
_NUM_LOGPROBS = 20
# room for what kernels on a CPU allocate inside of themselves
_INSIDE_KERNELS = 1.25
# A step that is timed on a CPU: about so long and no larger, because few tokens at a time are dearer each. A first run
# that took much longer serves as it is: its warm-up is a small part of it, unless it read the weights from a disk.
_TIMED_SECONDS = 0.05
_TIMED_TOKENS = 256
_LONG_SECONDS = 0.5
_MOST_RUNS = 8
# of the sequence that attention is timed with, or twice the tokens of a step where those are more
_TIMED_LENGTH = 4096


Agree: TypeAlias = Callable[[float], float]


def _alone(number: float) -> float:
    return number


class MeasuredModel(Protocol):
    """A model, or a head that stands in for one."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class EncodingModel(Protocol):
    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor: ...


class SourceModel(Protocol):
    def largest_source(self) -> Tensor: ...

    def encode(self, source: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class StepCost:
    """Bytes at the worst moment of the largest step, what was run to find out, and the time that a token takes."""

    num_bytes: int
    description: str
    seconds_per_token: float = 0.0
    # of num_bytes: the hidden states of all tokens, which stay until the step ends
    hidden_bytes: int = 0
    # a step of one token
    seconds_per_step: float = 0.0
    # beside num_bytes: recurrent states that the largest step copies
    state_bytes: int = 0
    # what a token takes longer, in all layers together, for each token before it that it sees
    seconds_per_pair: float = 0.0


def with_draft(target: StepCost, draft: StepCost | None) -> StepCost:
    """A step in which a draft follows the target: by turns, so that memory is that of the larger of the two."""
    if draft is None:
        return target
    num_bytes = max(target.num_bytes, draft.num_bytes + target.hidden_bytes)
    return replace(
        target,
        num_bytes=num_bytes,
        description=f"{target.description}; the draft included",
        seconds_per_token=target.seconds_per_token + draft.seconds_per_token,
        seconds_per_pair=target.seconds_per_pair + draft.seconds_per_pair,
    )


@torch.inference_mode()
def with_encoder(step: StepCost, model: EncodingModel, platform: Platform, config: WorkerConfig) -> StepCost:
    """A step before which the largest image is encoded: by turns, but what was made of images is kept beside it."""
    largest = config.largest_image
    if largest is None:
        return step
    size, num_bytes = _encoder_peak(model, largest, platform)
    of_all = largest.rows * largest.columns
    scaled = "" if size == of_all else f", measured with {size}"
    return replace(
        step,
        num_bytes=max(step.num_bytes, num_bytes) + config.encoder_cache_bytes,
        description=f"{step.description}; an image of {of_all} tokens{scaled}, and {_gib(config.encoder_cache_bytes)} "
        "for what was encoded",
    )


@torch.inference_mode()
def with_source(step: StepCost, model: SourceModel, platform: Platform, config: WorkerConfig) -> StepCost:
    """A step before which the largest source is encoded; what was made of others is kept beside it."""

    def encode() -> None:
        model.encode(model.largest_source().to(platform.device))

    if _runs_in_full(platform):
        _, num_bytes = _peak(lambda _: encode(), 1, platform)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True), LiveTensors() as live:
            encode()
        num_bytes = int(live.peak_bytes * _INSIDE_KERNELS)
    return replace(
        step,
        num_bytes=max(step.num_bytes, num_bytes) + config.encoder_cache_bytes,
        description=f"{step.description}; the largest source, and {_gib(config.encoder_cache_bytes)} for what was "
        "encoded",
    )


def _encoder_peak(model: EncodingModel, largest: LargestImage, platform: Platform) -> tuple[int, int]:
    """(tokens of the image that was encoded, bytes that the largest needs). A CPU need not encode it: sizes of tensors
    follow from each other. Where they depend on numbers, a smaller image is encoded."""

    def encode(rows: int, columns: int) -> None:
        grid = [1, rows * largest.merge_size, columns * largest.merge_size]
        model.encode_image(torch.zeros(grid[1] * grid[2], largest.patch_values, device=platform.device), grid)

    num_tokens = largest.rows * largest.columns
    if not _runs_in_full(platform):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), LiveTensors() as live:
                encode(largest.rows, largest.columns)
            return num_tokens, int(live.peak_bytes * _INSIDE_KERNELS)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
    side = math.isqrt(_SIZE_ON_CPU)

    def run(size: int) -> None:
        encode(*((largest.rows, largest.columns) if size == num_tokens else (side, side)))

    return _peak(run, num_tokens, platform, num_tokens if largest.is_only_size else side**2)


def bytes_of_step_graphs(model: nn.Module, platform: Platform, config: WorkerConfig, *, has_adapters: bool) -> int:
    """What graphs of steps will take, where the device has them; they are captured when caches are there."""
    device = platform.graph_device()
    cache = None if device is None else scratch_cache(model, config, platform.device)
    if device is None or cache is None:
        return 0
    try:
        buffers = StepBuffers.of(model, config, 0, platform.device)
        graphed = GraphedModel(model, buffers, device, has_adapters=has_adapters)
        return buffers.num_bytes + bytes_of_graphs(graphed)
    finally:
        cache.let_go()


def bytes_of_state_copies(states: list[LayerSpec], config: WorkerConfig) -> int:
    """Calculated, for a measured step has no states: those of sequences that absorb several tokens are remembered until
    the step has gone well, all layers of them, and one layer at a time may be gathered for all rows and put back."""
    if not states:
        return 0
    sizes = [layer.state_bytes for layer in states]
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    num_remembered = min(num_rows, config.max_num_batched_tokens // 2)
    return num_remembered * sum(sizes) + 2 * num_rows * max(sizes)


@torch.inference_mode()
def measure_largest_step(
    model: MeasuredModel, platform: Platform, config: WorkerConfig, agree: Agree = _alone
) -> StepCost:
    """Memory that the largest step needs above what is in use now, and the time of its tokens. `agree`: how ranks that
    compute together make one time of theirs, so that all go on alike."""

    cache = scratch_cache(model, config, platform.device) if _runs_in_full(platform) else None

    def run_model(num_tokens: int) -> Tensor:
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=platform.device)
        positions = torch.arange(num_tokens, device=platform.device) % config.max_model_len
        with forward_context(profiling_context() if cache is None else cache.context(num_tokens)):
            return model(tokens, positions)

    def make_logits(num_rows: int) -> int:
        rows = torch.zeros(num_rows, dtype=torch.int64, device=platform.device)
        return model.compute_logits(hidden[0][rows]).shape[1]

    most_tokens = config.max_num_batched_tokens
    # a row that has drafts is asked once for each of them
    num_drafts = config.speculation.num_speculative_tokens if config.speculation else 0
    most_rows = min(config.max_num_seqs * (1 + num_drafts), most_tokens)
    hidden: list[Tensor] = []
    with _counted_reads(model) as num_reads:
        start = time.perf_counter()
        tokens, tokens_bytes = _peak(lambda size: hidden.append(run_model(size)), most_tokens, platform)
        first_seconds = agree(time.perf_counter() - start)
    clock = _StepClock(run_model, platform, agree)
    reads_weights = isinstance(model, nn.Module) and num_mapped_bytes(model) > 0
    seconds = _seconds_per_token(clock, tokens, first_seconds, most_tokens, reads_weights=reads_weights)
    vocab_sizes: list[int] = []
    rows, rows_bytes = _peak(lambda size: vocab_sizes.append(make_logits(size)), most_rows, platform)
    rows_bytes += _slice_bytes(vocab_sizes[0], most_rows, platform)
    # The hidden states of all tokens are still there while the sampler runs.
    hidden_bytes = most_tokens * hidden[0][0].nbytes
    rows_bytes += hidden_bytes
    seconds_per_step = _least_seconds(clock, 1)
    if cache is not None:
        cache.let_go()
    scaled = " (scaled)" if (tokens, rows) != (most_tokens, most_rows) else ""
    return StepCost(
        max(tokens_bytes, rows_bytes),
        f"{most_tokens} tokens, {most_rows} sampling; measured with {tokens} and {rows}{scaled}",
        seconds,
        hidden_bytes,
        seconds_per_step,
        seconds_per_pair=_seconds_per_pair(model, num_reads, tokens, clock, config),
    )


def capacity(
    model: nn.Module,
    memory: MemoryReport,
    step: StepCost,
    utilization: float,
    host_bytes: int = 0,
    aside: Mapping[str, int] = MappingProxyType({}),
    num_sharing: int = 1,
) -> WorkerCapacity:
    """What is left of the memory, and the arithmetic in words. `aside`: what will be taken later, by what for;
    `num_sharing`: workers of this engine that have this memory together, each with an equal part.

    The engine may have a share of all there is; where others have taken more than the rest, it may have what they
    leave. What fits is not refused because of what they have."""
    used = memory.own_bytes
    most = int(memory.total_bytes * utilization)
    obtainable = memory.free_bytes + used * num_sharing
    allowed = min(most, obtainable) // num_sharing
    left = allowed - used - step.num_bytes - sum(aside.values())
    # a state that is copied lies in the cache as well, so copies never need more than half of what is left
    copies = min(step.state_bytes, max(0, left) // 2)
    left -= copies
    states = f"Copies of states in a step: {_gib(copies)}. " if copies else ""
    later = "".join(f"Set aside for {what}: {_gib(num_bytes)}. " for what, num_bytes in aside.items())
    share = f"{utilization:.0%} of it may be used: {_gib(most)}"
    if obtainable < most:
        share += f", and others leave {_gib(obtainable)} of it"
    if num_sharing > 1:
        share += f", {_gib(allowed)} by each of {num_sharing} ranks with its part of the model"
    explanation = (
        f"{_gib(memory.total_bytes)} is {memory.limit}; {share}. "
        f"In use now, weights included: {_gib(used)}. Largest step: {_gib(step.num_bytes)} ({step.description}). "
        f"{states}{later}Left for the KV cache: {_gib(max(0, left))}."
    )
    layers = [layer.spec for layer in attention_layers(model).values()]
    layers += [layer.spec for layer in recurrent_layers(model).values()]
    return WorkerCapacity(
        layers=layers,
        available_bytes=max(0, left),
        free_bytes=memory.free_bytes // num_sharing,
        step_bytes=step.num_bytes + copies + sum(aside.values()),
        explanation=explanation,
        host_bytes=host_bytes // num_sharing,
        seconds_per_token=step.seconds_per_token,
        seconds_per_step=step.seconds_per_step,
        seconds_per_pair=step.seconds_per_pair,
    )


@dataclass(frozen=True)
class _StepClock:
    """How long steps take."""

    run_model: Callable[[int], object]
    platform: Platform
    agree: Agree

    def seconds_of(self, num_tokens: int) -> float:
        start = time.perf_counter()
        self.run_model(num_tokens)
        self.platform.synchronize()
        return self.agree(time.perf_counter() - start)


def _seconds_per_token(
    clock: _StepClock, num_tokens: int, first_seconds: float, most: int, *, reads_weights: bool = False
) -> float:
    """The step once more, because the first one includes warm-up; with `reads_weights` it may be that for the most
    part."""
    if not _runs_in_full(clock.platform):
        if first_seconds > _LONG_SECONDS and not reads_weights:
            return first_seconds / num_tokens
        num_tokens = min(most, _TIMED_TOKENS, num_tokens * max(1, int(_TIMED_SECONDS / first_seconds)))
    return clock.seconds_of(num_tokens) / num_tokens


def _least_seconds(clock: _StepClock, num_tokens: int) -> float:
    """The least of some runs, because other work on the machine makes any of them longer; of a slow model, fewer. A
    GPU's kernels are compiled at the first call of their kind, which may take a thousand times as long."""
    if _runs_in_full(clock.platform):
        clock.seconds_of(num_tokens)
    seconds: list[float] = []
    while len(seconds) < _MOST_RUNS and sum(seconds) < _TIMED_SECONDS:
        seconds.append(clock.seconds_of(num_tokens))
    return min(seconds)


@contextmanager
def _counted_reads(model: object) -> Iterator[Counter[nn.Module]]:
    """How often each layer that keeps keys is read in a step that is run within: by itself, and by later layers that
    keep none of their own."""
    num_reads: Counter[nn.Module] = Counter()
    layers = attention_layers(model).values() if isinstance(model, nn.Module) else ()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: num_reads.update((layer,))) for layer in layers]
    try:
        yield num_reads
    finally:
        for hook in hooks:
            hook.remove()


def _seconds_per_pair(
    model: object, num_reads: Counter[nn.Module], num_tokens: int, clock: _StepClock, config: WorkerConfig
) -> float:
    """What each of so many tokens takes longer for a token before it, in all layers together. One layer is timed, which
    sees all tokens if any does."""
    layers = list(attention_layers(model).values()) if isinstance(model, nn.Module) else []
    device = clock.platform.device
    cache = scratch_cache(model, config, device) if layers else None
    if cache is None:
        return 0.0
    layer = min(layers, key=lambda layer: layer.sliding_window > 0)
    alike = [other for other in layers if other.sliding_window == layer.sliding_window]
    most = min(config.max_model_len, layer.sliding_window or config.max_model_len)
    length = min(most, max(_TIMED_LENGTH, 2 * num_tokens))
    num_tokens = min(num_tokens, length)
    context = cache.context_of([num_tokens], [length])
    query_TF = torch.zeros(num_tokens, layer.num_heads * layer.head_dim, dtype=layer.dtype, device=device)

    def attend(_: int) -> None:
        with forward_context(context):
            layer(query_TF)

    seconds = _least_seconds(replace(clock, run_model=attend), num_tokens)
    cache.let_go()
    # the last token sees all of the sequence, the first as many fewer as follow it
    num_pairs = num_tokens * (2 * length - num_tokens + 1) / 2
    reads_of_each = sum(num_reads[other] for other in alike) / len(alike)
    return seconds * reads_of_each * len(layers) / num_pairs


def _slice_bytes(vocab_size: int, most_rows: int, platform: Platform) -> int:
    """What the sampler needs beyond logits of all rows, at its worst moment: that of the largest slice."""
    num_rows = min(most_rows, rows_in_slice(vocab_size, platform.device))
    # Falling steeply: few tokens hold the share of top_p, so that a CPU takes its short way.
    logits = -torch.arange(vocab_size, dtype=torch.float32, device=platform.device).expand(num_rows, -1)
    reader = LogprobReader(np.full(num_rows, _NUM_LOGPROBS), vocab_size)

    def run(num_rows: int) -> None:
        changed = torch.empty_like(logits, memory_format=torch.contiguous_format)  # what processors work on
        tokens, _ = choose_tokens(changed.copy_(logits), _drawing(num_rows))
        reader.read(logits, tokens)

    return _peak(run, num_rows, platform, largest_on_cpu=num_rows)[1]


def _peak(
    run: Callable[[int], object], most: int, platform: Platform, largest_on_cpu: int = _SIZE_ON_CPU
) -> tuple[int, int]:
    """(size that was run, bytes that the largest size needs)."""
    is_full = _runs_in_full(platform)
    size = most if is_full else min(most, largest_on_cpu)
    with platform.measure_peak() as peak:
        run(size)
        platform.synchronize()
    return size, peak.peak_bytes if is_full else int(peak.peak_bytes * most / size * _INSIDE_KERNELS)


def _runs_in_full(platform: Platform) -> bool:
    return platform.device.type != "cpu"


def _drawing(num_rows: int) -> DrawSettings:
    return DrawSettings(
        temperature=np.ones(num_rows, dtype=np.float32),
        top_k=np.full(num_rows, 2**31, dtype=np.int64),
        top_p=np.full(num_rows, 0.9),
        min_p=np.zeros(num_rows, dtype=np.float32),
        uniform=np.full(num_rows, 0.5),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
