"""Where the recurrent states of a sequence lie in the blocks that it holds for them: read by the core and the worker.

A block has room for the keys and values of block_size tokens in each attention layer of a group. The part of one layer
is a *chunk*, its layer a *place*, and a state layer takes as many consecutive chunks as its state needs:

    chunk     0    1    2    3    4    5        of a model with 3 places
    block     0    0    0    1    1    1        entry of the sequence's table of states
    place     0    1    2    0    1    2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from quire.errors import ModelError
from quire.messages import LayerSpec

# Of every state, before what the layer keeps: int64, how many tokens it has absorbed, and padding.
STATE_HEADER_BYTES = 16
_ALIGNMENT = 64


class StateLayout(msgspec.Struct, kw_only=True, frozen=True):
    """The blocks that the states of one sequence take."""

    # bytes of a chunk, and chunks in a block
    chunk_bytes: int
    num_places: int
    # of one sequence
    num_blocks: int
    first_chunk_by_layer: dict[str, int]

    def place_of(self, chunk: int) -> tuple[int, int]:
        """(entry in the block table, place in that block)."""
        return divmod(chunk, self.num_places)


def state_layout(
    layers: list[LayerSpec], groups: Iterable[Sequence[str]], block_size: int, num_blocks: int = 0
) -> StateLayout | None:
    """None: no layer of the model keeps a state. `groups`: names of the attention layers that share a block table.
    `num_blocks`: so many blocks of a sequence hold its states elsewhere, and must hold those of these layers as well;
    0: as many as it takes.

    Without attention nothing else sets the size of a block, so that one holds all states of a sequence.
    """
    states = [layer for layer in layers if layer.state_bytes]
    if not states:
        return None
    attention = {layer.name: layer for layer in layers if not (layer.state_bytes or layer.is_draft)}
    if attention:
        num_places = max(sum(name in attention for name in names) for names in groups)
        chunk_bytes = _only({layer.bytes_per_token for layer in attention.values()}) * block_size
    else:
        num_places = len(states)
        chunk_bytes = _own_chunk_bytes([layer.state_bytes for layer in states], num_blocks)
    first_chunk_by_layer: dict[str, int] = {}
    num_chunks = 0
    for layer in states:
        first_chunk_by_layer[layer.name] = num_chunks
        num_chunks += -(-layer.state_bytes // chunk_bytes)
    if num_blocks:
        num_places = max(num_places if attention else 0, -(-num_chunks // num_blocks))
    return StateLayout(
        chunk_bytes=chunk_bytes,
        num_places=num_places,
        num_blocks=-(-num_chunks // num_places),
        first_chunk_by_layer=first_chunk_by_layer,
    )


def _own_chunk_bytes(sizes: list[int], num_blocks: int) -> int:
    """A whole state; or no more than it takes for all states to fill so many blocks, one chunk in each."""
    largest = _rounded_up(max(sizes), _ALIGNMENT)
    if not num_blocks:
        return largest
    least = _rounded_up(-(-sum(sizes) // num_blocks), _ALIGNMENT)
    fitting = (chunk for chunk in range(least, largest, _ALIGNMENT) if _num_chunks(sizes, chunk) <= num_blocks)
    return next(fitting, largest)


def _num_chunks(sizes: list[int], chunk_bytes: int) -> int:
    return sum(-(-size // chunk_bytes) for size in sizes)


def _only(sizes: set[int]) -> int:
    if len(sizes) > 1:
        raise ModelError(
            f"KV cache: attention layers that keep {', '.join(map(str, sorted(sizes)))} bytes of a token beside layers "
            "that keep a state: states need attention layers of one size. Such models are not served."
        )
    return next(iter(sizes))


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
