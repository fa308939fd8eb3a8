"""Steps of one token for each row as graphs of a device, which replays them without the host (4.6.3).

A graph is captured once for each size of a ladder. It reads and writes the same memory at every replay, so what changes
from step to step is copied into buffers that never move; places behind the last row are nobody's:

    5 rows    ids, positions, lengths, tables, slots  ->  buffers of the graph for 8  ->  replay  ->  hidden[:5]
    a row that is nobody's    sees no key, writes none, meets no expert, and has the spare block for its state

Steps in which a row has several tokens, images or a part of a pipeline run as before. Whether a device has graphs is
another object's business (`GraphDevice`); the largest graph is captured first, and the others live in its memory.

Owns the buffers and the graphs. Called by the model runner in the place of the model's `forward` and `compute_logits`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quire.config import WorkerConfig
from quire.messages import TEXT
from quire.worker.attention import AttentionBatch, attention_layers
from quire.worker.attention.paged import PagedAttention
from quire.worker.forward_context import ForwardContext, current_forward_context, forward_context
from quire.worker.state_cache import StateBatch, recurrent_layers

_logger = logging.getLogger(__name__)
# sizes up to the last of these, then steps of an eighth: padding computes at most so much more
_SMALL_SIZES = (1, 2, 4)
_STEP = 8


@dataclass(frozen=True)
class Outputs:
    """What a graph leaves where it always leaves it."""

    hidden_TE: Tensor
    logits_TV: Tensor


class Graph(Protocol):
    """One captured piece of work."""

    @property
    def outputs(self) -> Any:
        """What it leaves where it always leaves it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the device, that its capture has taken for good."""
        ...

    def replay(self) -> None:
        """Do it again, with what the same memory holds now."""
        ...


class GraphDevice(Protocol):
    """Captures what is launched on a device."""

    def capture(self, run: Callable[[], Any]) -> Graph:
        """Runs it twice: once for what is only made at a first call, and once to record it."""
        ...


def ladder(most_rows: int) -> list[int]:
    """Sizes for 1 to so many rows: 1, 2, 4, 8, 16, ... and from 64 on at most an eighth more than there are rows."""
    sizes = [size for size in _SMALL_SIZES if size < most_rows]
    size = _STEP
    while size < most_rows:
        sizes.append(size)
        size += max(_STEP, size // 8 // _STEP * _STEP)
    return [*sizes, most_rows]


def why_no_graphs(model: nn.Module) -> str | None:
    """None, or the reason why the steps of a model cannot be graphs."""
    layers = attention_layers(model).values()
    if not all(isinstance(layer.backend, PagedAttention) for layer in layers):
        return "its attention backend prepares each step in a way of its own"
    if any(layer.ranks.size > 1 for layer in layers):
        return "several workers share its keys and values"
    recurrent = recurrent_layers(model).values()
    if not all(layer.is_kernel for layer in recurrent):
        return "a recurrence of it is written in Python"
    if not layers and not recurrent:
        return "it has no layer that keeps anything of a sequence"
    return None


class StepBuffers:
    """The inputs of a step of one token for each row, where graphs look for them."""

    def __init__(
        self, model: nn.Module, most_rows: int, blocks_per_row: int, spare_block: int, device: torch.device
    ) -> None:
        """`spare_block`: of the cache, one that belongs to nobody: there the states of places behind the last row lie,
        which only exist while a graph runs."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.most_rows = most_rows
        self._spare_block = spare_block
        self._input_ids = zeros(most_rows)
        self._positions = zeros(most_rows)
        self._is_padding = zeros(most_rows, dtype=torch.bool)
        self._adapter_slots = torch.full((most_rows,), -1, dtype=torch.int32, device=device)
        # of all groups alike: a row has one token
        self._query_starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        groups = sorted({layer.group for layer in attention_layers(model).values()})
        # groups of layers that see their sequences from a place of each on
        self._of_text = {layer.group for layer in attention_layers(model).values() if layer.part == TEXT}
        self._begins = zeros(most_rows, dtype=torch.int32)
        self._lengths = {group: zeros(most_rows, dtype=torch.int32) for group in groups}
        self._tables = {group: zeros(most_rows, blocks_per_row, dtype=torch.int32) for group in groups}
        self._slots = {group: torch.full((most_rows,), -1, device=device) for group in groups}
        self._places: list[Tensor] = []
        recurrent = list(recurrent_layers(model).values())
        if recurrent:
            self._places = recurrent[0].places
            self._state_tables = torch.full((most_rows, recurrent[0].num_blocks), spare_block, device=device)
            self._starts = zeros(most_rows)
            self._kept = zeros(most_rows)
        # behind this row nothing was written since it was cleared
        self._num_filled = 0

    @classmethod
    def of(cls, model: nn.Module, config: WorkerConfig, spare_block: int, device: torch.device) -> StepBuffers:
        most_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        return cls(model, most_rows, -(-config.max_model_len // config.block_size), spare_block, device)

    @property
    def num_bytes(self) -> int:
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        of_groups = (*self._tables.values(), *self._slots.values(), *self._lengths.values())
        return sum(tensor.nbytes for tensor in (*own, *of_groups))

    def inputs(self, size: int) -> tuple[Tensor, Tensor]:
        return self._input_ids[:size], self._positions[:size]

    def context(self, size: int, *, has_adapters: bool) -> ForwardContext:
        """Of a step of this size."""
        starts = self._query_starts[: size + 1]
        metadata: list[Any] = [None] * (max(self._tables, default=-1) + 1)
        for group, tables in self._tables.items():
            metadata[group] = AttentionBatch(
                query_starts_S1=starts,
                seq_lens_S=self._lengths[group][:size],
                block_tables_SM=tables[:size],
                slots_T=self._slots[group][:size],
                max_query_len=1,
                max_seq_len=0,
                begins_S=self._begins[:size] if group in self._of_text else None,
            )
        states = None
        if self._places:
            of_rows = self._state_tables[:size], self._starts[:size], self._kept[:size]
            states = StateBatch(self._places, *of_rows, starts)
        slots = self._adapter_slots[:size] if has_adapters else None
        return ForwardContext(tuple(metadata), states, adapter_slots=slots, is_padding_T=self._is_padding[:size])

    def fill(self, input_ids: Tensor, positions: Tensor, context: ForwardContext, size: int) -> None:
        """What a step of this size is to compute."""
        count = len(input_ids)
        targets = [self._input_ids[:count], self._positions[:count]]
        sources = [input_ids, positions]
        for group, batch in enumerate(context.metadata):
            if batch is None or group not in self._tables:
                continue
            width = batch.block_tables_SM.shape[1]
            self._tables[group][:count, :width].copy_(batch.block_tables_SM)
            targets += [self._slots[group][:count], self._lengths[group][:count]]
            sources += [batch.slots_T, batch.seq_lens_S]
            if batch.begins_S is not None:
                targets.append(self._begins[:count])
                sources.append(batch.begins_S)
        if context.states is not None:
            targets += [self._state_tables[:count], self._starts[:count], self._kept[:count]]
            sources += [context.states.tables_Sn, context.states.starts_S, context.states.num_kept_S]
        if context.adapter_slots is not None:
            targets.append(self._adapter_slots[:count])
            sources.append(context.adapter_slots)
        for dtype in (torch.int64, torch.int32):
            # in one launch
            chosen = [index for index, target in enumerate(targets) if target.dtype == dtype]
            if chosen:
                torch._foreach_copy_([targets[index] for index in chosen], [sources[index] for index in chosen])
        self._is_padding[:count].zero_()
        self._clear(count, size)
        self._num_filled = count

    def _clear(self, count: int, size: int) -> None:
        """Places from `count` on are nobody's."""
        end = max(size, self._num_filled)
        if count == end:
            return
        self._is_padding[count:end].fill_(True)
        self._input_ids[count:end].zero_()
        self._positions[count:end].zero_()
        self._adapter_slots[count:end].fill_(-1)
        for slots in self._slots.values():
            slots[count:end].fill_(-1)
        for lengths in self._lengths.values():
            lengths[count:end].zero_()
        self._begins[count:end].zero_()
        if self._places:
            self._state_tables[count:end].fill_(self._spare_block)
            self._starts[count:end].zero_()
            self._kept[count:end].zero_()


class GraphedModel:
    """Stands in the place of a model's two calls, and takes what they take."""

    def __init__(self, model: nn.Module, buffers: StepBuffers, device: GraphDevice, *, has_adapters: bool) -> None:
        self._forward: Callable[..., Tensor] = model.forward
        self._compute_logits: Callable[[Tensor], Tensor] = model.compute_logits
        self._buffers = buffers
        self._device = device
        # without adapters, and with them
        self.kinds = (False, True) if has_adapters else (False,)
        self.sizes = ladder(buffers.most_rows)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        # of the last replay: hidden states as they were given out, and their logits
        self._given: Tensor | None = None
        self._logits: Tensor | None = None
        self.num_replays = 0

    def capture(self) -> None:
        """The largest size first, because the others then need hardly any memory of their own."""
        self._graphs.clear()
        for size in reversed(self.sizes):
            self.capture_size(size)

    @torch.inference_mode()
    def capture_size(self, size: int) -> list[Graph]:
        captured = []
        for has_adapters in self.kinds:
            graph = self._device.capture(partial(self._run, size, has_adapters=has_adapters))
            self._graphs[size, has_adapters] = graph
            captured.append(graph)
        return captured

    def _run(self, size: int, *, has_adapters: bool) -> Outputs:
        with forward_context(self._buffers.context(size, has_adapters=has_adapters)):
            hidden_TE = self._forward(*self._buffers.inputs(size))
            return Outputs(hidden_TE, self._compute_logits(hidden_TE))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        input_embeds: Tensor | None = None,
        intermediate_tensors: Any = None,
    ) -> Tensor:
        self._given = None
        context = current_forward_context()
        graph = None
        if input_embeds is None and intermediate_tensors is None and positions.ndim == 1:
            graph = self._graph_of(len(input_ids), context)
        if graph is None:
            more = () if input_embeds is None and intermediate_tensors is None else (input_embeds, intermediate_tensors)
            return self._forward(input_ids, positions, *more)
        count = len(input_ids)
        self._buffers.fill(input_ids, positions, context, len(graph.outputs.hidden_TE))
        graph.replay()
        self.num_replays += 1
        self._given = graph.outputs.hidden_TE[:count]
        self._logits = graph.outputs.logits_TV[:count]
        return self._given

    def compute_logits(self, hidden: Tensor) -> Tensor:
        if hidden is self._given and self._logits is not None:
            return self._logits
        return self._compute_logits(hidden)

    def _graph_of(self, count: int, context: ForwardContext) -> Graph | None:
        """For a step of so many tokens, each of another row."""
        if context.is_profiling or not 1 <= count <= self.sizes[-1]:
            return None
        batches = [batch for batch in context.metadata if batch is not None]
        num_rows = {len(batch.seq_lens_S) for batch in batches}
        if context.states is not None:
            num_rows.add(len(context.states.starts_S))
        if num_rows != {count} or any(batch.ends_T is not None for batch in batches):
            return None
        size = next(size for size in self.sizes if size >= count)
        return self._graphs.get((size, context.adapter_slots is not None))


def bytes_of_graphs(graphed: GraphedModel) -> int:
    """Of the largest one, in whose memory the others live, and what each of these takes beside it: two are captured to
    find out. Before caches are there, on scratch."""
    largest = graphed.capture_size(graphed.sizes[-1])
    others = len(graphed.sizes) * len(graphed.kinds) - len(largest)
    if not others:
        return sum(graph.num_bytes for graph in largest)
    each = max(graph.num_bytes for graph in graphed.capture_size(graphed.sizes[0]))
    return sum(graph.num_bytes for graph in largest) + others * each


def graph_model(model: Any, buffers: StepBuffers, device: GraphDevice, *, has_adapters: bool) -> GraphedModel:
    """Exchange a model's two calls for those that replay graphs. After caches are bound."""
    graphed = GraphedModel(model, buffers, device, has_adapters=has_adapters)
    graphed.capture()
    model.forward = graphed.forward
    model.compute_logits = graphed.compute_logits
    _logger.info("steps of up to %d rows with one token each are graphs", buffers.most_rows)
    return graphed
