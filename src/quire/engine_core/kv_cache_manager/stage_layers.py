"""Workers that have some layers each: one plan of blocks for all of them.

A block has the same number everywhere and holds a part on each stage: what the layers of that stage keep. So the plan
is made with the layers of all, and a block counts with the largest of its parts, which one worker must have room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from quire.engine_core.kv_cache_manager.groups import KVGroup
from quire.messages import LayerSpec
from quire.state_layout import state_layout


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
