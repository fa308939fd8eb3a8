"""What the stages of a pipeline keep, each of its own layers: one plan of blocks for all of them.

A block has the same number everywhere and holds a part on each stage: the keys and values of that stage's layers. So
the core plans with the layers of all stages, and memory is counted as if they were one, with the largest part as the
measure of all.
"""

from __future__ import annotations

from quire.engine_core.kv_cache_manager.groups import KVGroup, make_groups
from quire.messages import LayerSpec
from quire.state_layout import state_layout


class StageLayers:
    """Layers by stage."""

    def __init__(self, stages: list[list[LayerSpec]], block_size: int) -> None:
        self.layers = [layer for of_stage in stages for layer in of_stage]
        groups, self._block_bytes = make_groups(self.layers, block_size)
        # of a sequence, where layers keep states
        self.num_state_blocks = groups[-1].num_state_blocks if groups else 0
        parts = [_bytes_of_part(of_stage, groups, block_size, self.num_state_blocks) for of_stage in stages]
        self._largest_part = max(parts, default=0)

    def together(self, num_bytes: int) -> int:
        """What all stages have, if each of them has so many bytes and no more blocks than the stage with the largest
        part."""
        return num_bytes * self._block_bytes // self._largest_part if self._largest_part else num_bytes


def _bytes_of_part(layers: list[LayerSpec], groups: list[KVGroup], block_size: int, num_state_blocks: int) -> int:
    """Of a block, what a stage keeps."""
    bytes_per_token = {layer.name: layer.bytes_per_token for layer in layers if not layer.state_bytes}
    names = [[name for name in group.layer_names if name in bytes_per_token] for group in groups]
    of_tokens = max(sum(bytes_per_token[name] for name in members) for members in names) * block_size
    layout = state_layout(layers, names, block_size, num_state_blocks)
    return max(of_tokens, layout.num_places * layout.chunk_bytes if layout else 0)
