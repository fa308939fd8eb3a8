"""Groups: layers that share a block layout; one pool, a block table per group.

Layers with equal specs keep the same tokens. Specs with more layers than the rarest one are cut into several groups of
that size, so that a block costs the same bytes in every group and any block can serve any group. Layers of a model that
drafts have other shapes and join these groups: whatever becomes of a block, happens to their keys and values as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from quire.errors import ModelError
from quire.messages import LayerSpec


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table. `sliding_window` of 0 means that every token is kept.

    Where `is_chunked`, a token sees the tokens of its own chunk of `sliding_window` tokens, counted from position 0.
    """

    layer_names: tuple[str, ...]
    sliding_window: int = 0
    is_chunked: bool = False

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
        whole = -(-num_tokens // block_size)
        if self.sliding_window == 0:
            return whole
        # what the window reaches back to (a chunk no further), what the step writes, and one for the boundaries of both
        windowed = -(-self.sliding_window // block_size) + -(-step_tokens // block_size) + 1
        return min(whole, windowed)


def make_groups(layers: list[LayerSpec]) -> tuple[list[KVGroup], int]:
    """The groups of a model and of what drafts for it, and the bytes that one token costs in a block of any group."""
    groups = _groups_of_target([layer for layer in layers if not layer.is_draft])
    groups = _with_draft(groups, [layer for layer in layers if layer.is_draft])
    return groups, _bytes_per_token(groups, layers)


def _groups_of_target(layers: list[LayerSpec]) -> list[KVGroup]:
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
