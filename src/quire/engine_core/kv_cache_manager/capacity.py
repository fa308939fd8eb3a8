"""How many blocks there are, and why: from what a worker measured, what was asked for, and what the requests can use.

A small model must not take the machine (it is capped by need), and a long context must not fail at the first long
request (the length is lowered to what memory holds, if the user left it to us).

Where workers have some layers each, there is one plan of blocks for all of them. A block has the same number everywhere
and holds a part on each stage: what the layers of that stage keep. So the plan is made with the layers of all, and a
block counts with the largest of its parts, which one worker must have room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from quire.engine_core.kv_cache_manager.groups import KVGroup, make_groups, most_blocks_of
from quire.errors import CapacityError
from quire.messages import LayerSpec, WorkerCapacity
from quire.state_layout import state_layout

GIB = 2**30
_DEFAULT_CPU_CAP = 4 * GIB
_DEFAULT_SWAP_SPACE = 4 * GIB
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True)
class CacheOptions:
    """The options that bear on capacity."""

    block_size: int
    max_model_len: int
    may_lower_max_model_len: bool
    max_num_seqs: int
    step_tokens: int
    num_blocks: int | None
    memory_bytes: int | None
    is_cpu: bool
    # None: as much as is useful and harmless
    swap_space_bytes: int | None = None
    # engines that share what is free on this machine
    num_replicas: int = 1
    # workers that share the keys and values of each block; bytes are those of one of them
    num_context_ranks: int = 1

    @property
    def slots_per_block(self) -> int:
        return self.block_size // self.num_context_ranks


@dataclass(frozen=True)
class CachePlan:
    """The decision, with the sentence that the start-up log shows."""

    groups: list[KVGroup]
    num_blocks: int
    max_model_len: int
    explanation: str
    num_host_blocks: int = 0


def plan_cache(measured: WorkerCapacity, options: CacheOptions) -> CachePlan:
    """The number of blocks and the greatest length; CapacityError says what would fit."""
    if not measured.layers:
        return _plan_without_cache(options)
    groups, block_bytes = make_groups(measured.layers, options.slots_per_block)
    if measured.num_layers_of_stages:
        block_bytes = largest_part(measured.layers, measured.num_layers_of_stages, groups, options.slots_per_block)
    per_request = _blocks_per_request(groups, options, options.max_model_len)
    num_blocks, reason = _num_blocks(measured, options, block_bytes, per_request)
    # a size that was asked for may take what is set aside for the largest step, and the share of others
    obtainable = max(measured.available_bytes, measured.free_bytes)
    if num_blocks * block_bytes > obtainable:
        most = obtainable // block_bytes
        most_of_it = most * block_bytes if reason == "kv_cache_memory_bytes" else most
        raise CapacityError(
            f"KV cache: {num_blocks:,} blocks ({reason}) need {_size(num_blocks * block_bytes)}, "
            f"{_size(obtainable)} is available. {measured.explanation} "
            f"At most {most:,} blocks fit: lower {reason} to {most_of_it}, or leave it out."
        )
    over = num_blocks * block_bytes - measured.available_bytes
    if over > 0:
        reason += f", {_size(over)} more than gpu_memory_utilization and the largest step would leave"
    length = options.max_model_len
    if num_blocks < per_request:
        longest = _longest(groups, options, num_blocks)
        if not options.may_lower_max_model_len or longest < 2:
            raise CapacityError(_too_small(options, block_bytes, per_request, num_blocks, longest, reason))
        length, reason = longest, f"{reason}; max_model_len lowered from {length} to {longest} to fit"
    held = _what_they_hold(groups, options, num_blocks)
    explanation = (
        f"KV cache: {num_blocks:,} blocks of {options.block_size} tokens{held}, "
        f"{_size(num_blocks * block_bytes)} ({reason}); "
        f"{num_blocks / _blocks_per_request(groups, options, length):.1f} requests of {length:,} tokens at once"
    )
    num_host_blocks = _num_host_blocks(measured, options, num_blocks, block_bytes)
    if num_host_blocks:
        explanation += f"; swap space: {num_host_blocks:,} blocks, {_size(num_host_blocks * block_bytes)}"
    elif options.swap_space_bytes:
        explanation += "; no swap space: it has no room for a block, preempted requests are computed again"
    return CachePlan(groups, num_blocks, length, explanation, num_host_blocks)


def _plan_without_cache(options: CacheOptions) -> CachePlan:
    """Of a model that keeps nothing of a token. Blocks without a byte go on telling how many tokens there are."""
    groups = [KVGroup(())]
    num_blocks = _blocks_per_request(groups, options, options.max_model_len) * options.max_num_seqs
    explanation = "no KV cache: the tokens of a request see each other and are computed in one step"
    return CachePlan(groups, num_blocks, options.max_model_len, explanation)


def _num_host_blocks(measured: WorkerCapacity, options: CacheOptions, num_blocks: int, block_bytes: int) -> int:
    """3.4.5: swap space never exceeds the KV cache, because what is in it was in there."""
    asked = options.swap_space_bytes
    most = min(num_blocks, measured.host_bytes // options.num_replicas // block_bytes)
    if asked is None:
        return min(most, _DEFAULT_SWAP_SPACE // block_bytes)
    wanted = min(num_blocks, asked // block_bytes)
    if wanted > most:
        raise CapacityError(
            f"swap_space={asked / GIB:.2f}: {_size(wanted * block_bytes)} of it can be used, but only "
            f"{_size(measured.host_bytes)} of memory may be taken for it. Lower swap_space, or leave it out."
        )
    return wanted


def _num_blocks(measured: WorkerCapacity, options: CacheOptions, block_bytes: int, per_request: int) -> tuple[int, str]:
    if options.num_blocks is not None:
        return options.num_blocks, "num_gpu_blocks_override"
    if options.memory_bytes is not None:
        return options.memory_bytes // block_bytes, "kv_cache_memory_bytes"
    free = measured.available_bytes // options.num_replicas
    need = per_request * options.max_num_seqs * block_bytes
    if not options.is_cpu:
        return min(need, free) // block_bytes, _because(need <= free, measured.explanation)
    limit = bytes_on_cpu(free, per_request * block_bytes, is_needed=not options.may_lower_max_model_len)
    return min(need, limit) // block_bytes, _because(need <= limit, measured.explanation)


def bytes_on_cpu(free_bytes: int, request_bytes: int, *, is_needed: bool = False) -> int:
    """Its memory belongs to others too: half of what is free, and no more than the cap unless one request needs it.
    `is_needed`: a request of this length was asked for, so it may take all that is free."""
    limit = min(int(free_bytes * _SHARE_OF_FREE_MEMORY), max(_DEFAULT_CPU_CAP, request_bytes))
    return max(limit, min(free_bytes, request_bytes)) if is_needed else limit


def _what_they_hold(groups: list[KVGroup], options: CacheOptions, num_blocks: int) -> str:
    """In tokens; where states are, in those of one sequence, for whoever comes next brings a state as well."""
    of_state = sum(group.num_state_blocks for group in groups)
    num_attention = sum(not group.num_state_blocks for group in groups)
    state = f" (the state of a sequence takes {of_state:,} of them)" if of_state else ""
    if not num_attention:
        return state
    return f" = {max(0, num_blocks - of_state) * options.block_size // num_attention:,} tokens{state}"


def _because(need_is_met: bool, explanation: str) -> str:
    return "all that max_num_seqs requests can use" if need_is_met else explanation


def _blocks_per_request(groups: list[KVGroup], options: CacheOptions, length: int) -> int:
    return most_blocks_of(groups, length, options.step_tokens, options.block_size)


def _longest(groups: list[KVGroup], options: CacheOptions, num_blocks: int) -> int:
    """The greatest length of which one request fits; by bisection, because windows make the need irregular."""
    low = 0
    high = options.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _blocks_per_request(groups, options, middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _too_small(
    options: CacheOptions, block_bytes: int, per_request: int, num_blocks: int, longest: int, reason: str
) -> str:
    advice = f"Lower max_model_len to {longest:,}" if longest >= 2 else "Give the KV cache more memory"
    return (
        f"max_model_len={options.max_model_len}: needs {_size(per_request * block_bytes)} of KV cache per request "
        f"({per_request:,} blocks), {_size(num_blocks * block_bytes)} is available ({num_blocks:,} blocks; "
        f"{reason}). "
        f"{advice}, or raise kv_cache_memory_bytes or num_gpu_blocks_override."
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def largest_part(
    layers: list[LayerSpec], num_layers_of_stages: Sequence[int], groups: list[KVGroup], block_size: int
) -> int:
    """Bytes of a block on the stage that keeps most of it; `groups` are those of all `layers`."""
    bounds = pairwise(accumulate(num_layers_of_stages, initial=0))
    return max(_bytes_of_part(layers[first:end], groups, block_size) for first, end in bounds)


def _bytes_of_part(layers: list[LayerSpec], groups: list[KVGroup], block_size: int) -> int:
    """Of a block, what a stage keeps."""
    bytes_per_token = {layer.name: layer.bytes_per_token for layer in layers if not layer.state_bytes}
    names = [[name for name in group.layer_names if name in bytes_per_token] for group in groups]
    of_tokens = max(sum(bytes_per_token[name] for name in members) for members in names) * block_size
    layout = state_layout(layers, names, block_size, groups[-1].num_state_blocks)
    return max(of_tokens, layout.num_places * layout.chunk_bytes if layout else 0)
