"""Groups: layers that share a block layout; one pool, a block table per group.

Layers with equal specs keep the same tokens. Specs with more layers than the rarest one are cut into several groups of
that size, so that a block costs the same bytes in every group and any block can serve any group.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.errors import ModelError
from quire.messages import LayerSpec


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table. `sliding_window` of 0 means that every token is kept."""

    layer_names: tuple[str, ...]
    sliding_window: int = 0

    def first_needed_block(self, num_computed_tokens: int, block_size: int) -> int:
        """Blocks before this one are not read by any token from num_computed_tokens - 1 on.

        One token further back than the next one reads: a fork, and streamed input that ends, compute one again.
        """
        if self.sliding_window == 0:
            return 0
        return max(0, num_computed_tokens - self.sliding_window) // block_size

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that one sequence of that length ever holds, when a step writes up to step_tokens."""
        whole = -(-num_tokens // block_size)
        if self.sliding_window == 0:
            return whole
        # what the window reaches back to, what the step writes, and one for the boundaries of both
        windowed = -(-self.sliding_window // block_size) + -(-step_tokens // block_size) + 1
        return min(whole, windowed)


def make_groups(layers: list[LayerSpec]) -> tuple[list[KVGroup], int]:
    """The groups of a model, and the bytes that one token costs in the layers of one group."""
    by_spec: dict[LayerSpec, list[str]] = {}
    for layer in layers:
        by_spec.setdefault(msgspec.structs.replace(layer, name=""), []).append(layer.name)
    sizes = {(spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.bytes_per_element) for spec in by_spec}
    if len(sizes) > 1:
        raise ModelError(
            f"KV cache: layers of {len(sizes)} different shapes ({sorted(sizes)}) in one model; one is supported."
        )
    size = min(len(names) for names in by_spec.values())
    groups = [
        KVGroup(tuple(names[start : start + size]), spec.sliding_window)
        for spec, names in by_spec.items()
        for start in range(0, len(names), size)
    ]
    return groups, size * next(iter(by_spec)).bytes_per_token
