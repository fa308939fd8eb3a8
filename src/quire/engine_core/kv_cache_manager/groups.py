"""Groups: layers that share a block layout; one pool, a block table per group.

Layers with equal specs keep the same tokens. Specs with more layers than the rarest one are cut into several groups of
that size, so that a block costs the same bytes in every group and any block can serve any group. Layers of a model that
drafts have other shapes and join these groups: whatever becomes of a block, happens to their keys and values as well.

Recurrent layers keep a state of the whole sequence instead. They are one group, the last: its table has so many blocks
from the first token to the last, and all of them are written in every step (state_layout.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.errors import ModelError
from quire.messages import IntArray, LayerSpec
from quire.state_layout import StateLayout, state_layout


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table. `sliding_window` of 0 means that every token is kept.

    Where `is_chunked`, a token sees the tokens of its own chunk of `sliding_window` tokens, counted from position 0.
    """

    layer_names: tuple[str, ...]
    sliding_window: int = 0
    is_chunked: bool = False
    # blocks of the state of one sequence, whatever its length; 0: a group that keeps tokens
    num_state_blocks: int = 0

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Entries of the table of a sequence of that length."""
        return min(num_tokens, 1) * self.num_state_blocks or -(-num_tokens // block_size)

    def written_at(self, position: int, block_size: int) -> range:
        """Entries of the table that change when the token at this position is computed."""
        if self.num_state_blocks:
            return range(self.num_state_blocks)
        index = position // block_size
        return range(index, index + 1)

    def num_filled(self, num_tokens: int, num_entries: int, block_size: int) -> IntArray:
        """Filled slots by entry of the table; a state has no slots that are still empty."""
        if self.num_state_blocks:
            return np.full(num_entries, block_size, dtype=np.int64)
        return np.clip(num_tokens - np.arange(num_entries) * block_size, 0, block_size)

    def first_needed_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Blocks before this one are not read by any token from num_computed_tokens - 1 on.

        One token further back than the next one reads: a fork, and streamed input that ends, compute one again.
        """
        if self.sliding_window == 0:
            return 0
        if self.is_chunked:
            last = max(0, num_computed_tokens - 1)
            return (last - last % self.sliding_window) // block_size
        return max(0, num_computed_tokens - self.sliding_window) // block_size

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that one sequence of that length ever holds, when a step writes up to step_tokens."""
        whole = self.num_blocks(num_tokens, block_size)
        if self.sliding_window == 0:
            return whole
        # what the window reaches back to (a chunk no further), what the step writes, and one for the boundaries of both
        windowed = -(-self.sliding_window // block_size) + -(-step_tokens // block_size) + 1
        return min(whole, windowed)


def make_groups(layers: list[LayerSpec], block_size: int = 1) -> tuple[list[KVGroup], int]:
    """The groups of a model and of what drafts for it, and the bytes of a block of any group."""
    attention = [layer for layer in layers if not layer.state_bytes]
    groups = _groups_of_target([layer for layer in attention if not layer.is_draft])
    groups = _with_draft(groups, [layer for layer in attention if layer.is_draft])
    block_bytes = _bytes_per_token(groups, attention) * block_size
    layout = state_layout(layers, block_size)
    if layout is not None:
        groups = [*groups, _group_of_states(layout)]
        block_bytes = block_bytes or layout.chunk_bytes * layout.num_places
    return groups, block_bytes


def _group_of_states(layout: StateLayout) -> KVGroup:
    return KVGroup(tuple(layout.first_chunk_by_layer), num_state_blocks=layout.num_blocks)


def _groups_of_target(layers: list[LayerSpec]) -> list[KVGroup]:
    if not layers:
        return []
    by_spec: dict[LayerSpec, list[str]] = {}
    for layer in layers:
        by_spec.setdefault(_without_name(layer), []).append(layer.name)
    shapes = {(spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.bytes_per_element) for spec in by_spec}
    if len(shapes) > 1:
        raise ModelError(
            f"KV cache: layers of {len(shapes)} different shapes ({sorted(shapes)}) in one model; one is supported."
        )
    size = min(len(names) for names in by_spec.values())
    return [
        KVGroup(tuple(names[start : start + size]), spec.sliding_window, spec.is_chunked)
        for spec, names in by_spec.items()
        for start in range(0, len(names), size)
    ]


def _with_draft(groups: list[KVGroup], layers: list[LayerSpec]) -> list[KVGroup]:
    """A draft's layer joins the smallest of the groups that keep its tokens: those with its window, or else those that
    keep all tokens. Where there is none, layers of one window form a group of their own."""
    names = [list(group.layer_names) for group in groups]
    windows = [(group.sliding_window, group.is_chunked) for group in groups]
    for layer in layers:
        own = layer.sliding_window, layer.is_chunked
        window = own if own in windows else (0, False)
        fitting = [index for index, other in enumerate(windows) if other == window]
        if fitting:
            min((names[index] for index in fitting), key=len).append(layer.name)
        else:
            names.append([layer.name])
            windows.append(own)
    return [KVGroup(tuple(members), *window) for members, window in zip(names, windows, strict=True)]


def _bytes_per_token(groups: list[KVGroup], layers: list[LayerSpec]) -> int:
    """Any block can serve any group, so it has room for the most layers of each shape that one group has."""
    by_name = {layer.name: layer for layer in layers}
    most: Counter[LayerSpec] = Counter()
    for group in groups:
        most |= Counter(_shape(by_name[name]) for name in group.layer_names)
    return sum(shape.bytes_per_token * count for shape, count in most.items())


def _shape(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, name="", sliding_window=0, is_chunked=False)


def _without_name(layer: LayerSpec) -> LayerSpec:
    return msgspec.structs.replace(layer, name="")
