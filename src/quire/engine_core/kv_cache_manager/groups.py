"""Groups: layers with one block table; one pool, a block table per group.

Layers that keep the same tokens, those of one window, fill blocks together. Any block can serve any group, so it has
room for the group that needs most: layers of one window are cut into as many groups as make the others' blocks full,
whatever a layer keeps of a token. Layers of a model that drafts join these groups: whatever becomes of a block, happens
to their keys and values as well.

Where the tokens of a source, which an encoder reads, stand before a text, cross attention keeps those alone: blocks of
its group never grow. The text's attention to itself keeps the others. How long a source is, each request says
(`GroupsByLength`).

Recurrent layers keep a state of the whole sequence instead. They are one group, the last: its table has so many blocks
from the first token to the last, and all of them are written in every step (state_layout.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quire.messages import SOURCE, TEXT, IntArray, LayerSpec
from quire.state_layout import StateLayout, state_layout

if TYPE_CHECKING:
    from quire.engine_core.request import Request

# sliding_window, is_chunked and part of layers
Window: TypeAlias = tuple[int, bool, str]
# What a group costs a step, which builds a table for it, weighed against the part of the cache that stays empty.
_COST_OF_GROUP = 0.02


@dataclass(frozen=True)
class KVGroup:
    """Layers with one block table. `sliding_window` of 0 means that every token is kept.

    Where `is_chunked`, a token sees the tokens of its own chunk of `sliding_window` tokens, counted from position 0.
    """

    layer_names: tuple[str, ...]
    sliding_window: int = 0
    is_chunked: bool = False
    # of a sequence only the tokens of its source are kept, or only those of its text; "": all
    part: str = ""
    # where that part begins, and where it ends (0: with the sequence), once it is known whose sequence it is
    kept_from: int = 0
    kept_until: int = 0
    # blocks of the state of one sequence, whatever its length; 0: a group that keeps tokens
    num_state_blocks: int = 0

    def behind(self, num_sources: int) -> KVGroup:
        """The same for sequences whose source has so many tokens."""
        if self.part == SOURCE:
            return replace(self, kept_until=num_sources)
        return replace(self, kept_from=num_sources) if self.part == TEXT else self

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Entries of the table of a sequence of that length."""
        return min(num_tokens, 1) * self.num_state_blocks or -(-num_tokens // block_size)

    def kept_blocks(self, first: int, end: int, block_size: int) -> range:
        """Entries of a table from `first` to `end` that have a block; the others stay empty."""
        low = max(first, self.kept_from // block_size)
        high = min(end, -(-self.kept_until // block_size)) if self.kept_until else end
        return range(low, max(low, high))

    def written_at(self, position: int, block_size: int) -> range:
        """Entries of the table that change when the token at this position is computed."""
        if self.num_state_blocks:
            return range(self.num_state_blocks)
        if position < self.kept_from or 0 < self.kept_until <= position:
            return range(0)
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
        first = 0
        if self.is_chunked:
            last = max(0, num_computed_tokens - 1)
            first = last - last % self.sliding_window
        elif self.sliding_window:
            first = max(0, num_computed_tokens - self.sliding_window)
        return max(first, self.kept_from) // block_size

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Most blocks that one sequence of that length ever holds, when a step writes up to step_tokens."""
        whole = len(self.kept_blocks(0, self.num_blocks(num_tokens, block_size), block_size))
        if self.sliding_window == 0:
            return whole
        # what the window reaches back to (a chunk no further), what the step writes, and one for the boundaries of both
        windowed = -(-self.sliding_window // block_size) + -(-step_tokens // block_size) + 1
        return min(whole, windowed)


class GroupsByLength:
    """The groups of a model as the sequences of a request see them."""

    def __init__(self, groups: list[KVGroup]) -> None:
        self.groups = groups
        self._has_parts = any(group.part for group in groups)
        self._by_length: dict[int, list[KVGroup]] = {}

    def of(self, request: Request) -> list[KVGroup]:
        if not self._has_parts:
            return self.groups
        num_sources = request.num_sources
        if num_sources not in self._by_length:
            self._by_length[num_sources] = [group.behind(num_sources) for group in self.groups]
        return self._by_length[num_sources]


def most_blocks_of(groups: Sequence[KVGroup], num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Most blocks that a sequence of that length ever holds, however long its source is: a token is of the source or of
    the text, and where one ends and the other begins both have a block."""
    source, text = ([group for group in groups if group.part == part] for part in (SOURCE, TEXT))
    if not source and not text:
        return sum(group.most_blocks(num_tokens, step_tokens, block_size) for group in groups)
    others = [group for group in groups if not group.part]
    most_of_part = max(
        sum(group.most_blocks(num_tokens, step_tokens, block_size) for group in members) for members in (source, text)
    )
    both = min(len(source), len(text))
    return most_of_part + both + sum(group.most_blocks(num_tokens, step_tokens, block_size) for group in others)


def make_groups(layers: list[LayerSpec], block_size: int = 1) -> tuple[list[KVGroup], int]:
    """The groups of a model and of what drafts for it, and the bytes of a block of any group. `block_size`: the tokens
    of a block that a worker keeps."""
    attention = [layer for layer in layers if not layer.state_bytes]
    groups = _groups_of_target([layer for layer in attention if not layer.is_draft])
    groups = _with_draft(groups, [layer for layer in attention if layer.is_draft])
    by_name = {layer.name: layer for layer in attention}
    of_groups = [_bytes_per_token(by_name[name] for name in group.layer_names) for group in groups]
    block_bytes = max(of_groups, default=0) * block_size
    layout = state_layout(layers, [group.layer_names for group in groups], block_size)
    if layout is not None:
        groups = [*groups, _group_of_states(layout)]
        if all(layer.is_draft for layer in attention):
            # beside what a draft keeps, for there is no attention of the target to lie in
            block_bytes += layout.chunk_bytes * layout.num_places
    return groups, block_bytes


def _group_of_states(layout: StateLayout) -> KVGroup:
    return KVGroup(tuple(layout.first_chunk_by_layer), num_state_blocks=layout.num_blocks)


def _groups_of_target(layers: list[LayerSpec]) -> list[KVGroup]:
    if not layers:
        return []
    by_window: dict[Window, list[LayerSpec]] = {}
    for layer in layers:
        by_window.setdefault(_window_of(layer), []).append(layer)
    width = min(_widths(by_window), key=lambda width: (_cost(by_window, width), -width))
    return [
        KVGroup(tuple(layer.name for layer in members), *window)
        for window, of_window in by_window.items()
        for members in _cut(of_window, width)
    ]


def _window_of(layer: LayerSpec) -> Window:
    return layer.sliding_window, layer.is_chunked, layer.part


def _widths(by_window: Mapping[Window, list[LayerSpec]]) -> list[int]:
    """Bytes of a token that a block may be made for: as much as some first layers of a window need, or the largest
    layer, and no more than all layers of the rarest window."""
    largest = max(layer.bytes_per_token for layers in by_window.values() for layer in layers)
    sums = [list(accumulate(layer.bytes_per_token for layer in layers)) for layers in by_window.values()]
    most = max(largest, min(of_window[-1] for of_window in sums))
    return sorted({largest} | {width for of_window in sums for width in of_window if largest <= width <= most})


def _cost(by_window: Mapping[Window, list[LayerSpec]], width: int) -> float:
    """The part of the cache that stays empty, and something for each group.

    A short sequence fills blocks of all groups. A long one mostly has blocks of those that keep every token, so that
    the worse of both counts."""
    cuts = {window: _cut(layers, width) for window, layers in by_window.items()}
    whole = [group for window, groups in cuts.items() if not window[0] for group in groups]
    every = [group for groups in cuts.values() for group in groups]
    empty = max(1 - sum(map(_bytes_per_token, groups)) / (width * len(groups)) for groups in (whole, every) if groups)
    return empty + _COST_OF_GROUP * len(every)


def _cut(layers: list[LayerSpec], width: int) -> list[list[LayerSpec]]:
    """In their order, as many in a group as have room."""
    groups: list[list[LayerSpec]] = []
    room = 0
    for layer in layers:
        if layer.bytes_per_token > room:
            groups.append([])
            room = width
        groups[-1].append(layer)
        room -= layer.bytes_per_token
    return groups


def _with_draft(groups: list[KVGroup], layers: list[LayerSpec]) -> list[KVGroup]:
    """A draft's layer joins the smallest of the groups that keep its tokens: those with its window, or else those that
    keep all tokens. Where there is none, layers of one window form a group of their own."""
    names = [list(group.layer_names) for group in groups]
    windows: list[Window] = [(group.sliding_window, group.is_chunked, group.part) for group in groups]
    for layer in layers:
        own = _window_of(layer)
        window = own if own in windows else (0, False, "")
        fitting = [index for index, other in enumerate(windows) if other == window]
        if fitting:
            min((names[index] for index in fitting), key=len).append(layer.name)
        else:
            names.append([layer.name])
            windows.append(own)
    return [KVGroup(tuple(members), *window) for members, window in zip(names, windows, strict=True)]


def _bytes_per_token(layers: Iterable[LayerSpec]) -> int:
    return sum(layer.bytes_per_token for layer in layers)
