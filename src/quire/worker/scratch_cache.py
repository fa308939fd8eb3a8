"""A cache of one block for a step that is only measured, where the block tables of all sequences name that block alone.

So attention and recurrences run as they will, with work space for tables of full length, before anybody knows how many
blocks there will be. Keys are zeros, nothing is written to slots, and a state is overwritten by whoever comes last:
what is computed means nothing.

Owns the memory until it is let go. Called by the measurement of capacity: for the largest step on
devices that run it in full, and for the time that attention takes behind many tokens.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from quire.config import WorkerConfig
from quire.state_layout import state_layout
from quire.worker.attention import AttentionBatch, attention_layers
from quire.worker.forward_context import ForwardContext
from quire.worker.kernels.cache_format import row_elements
from quire.worker.kernels.sequence_states import HostSpans
from quire.worker.state_cache import StateBatch, recurrent_layers


class ScratchCache:
    """Bound to the layers of a model; makes the context of a step that is measured."""

    def __init__(self, model: nn.Module, config: WorkerConfig, device: torch.device) -> None:
        self._device = device
        self._most_tokens = config.max_model_len
        self._blocks_per_row = -(-config.max_model_len // config.block_size)
        self._layers = list(attention_layers(model).values())
        self._recurrent = list(recurrent_layers(model).values())
        self._places: list[Tensor] = []
        for layer in self._layers:
            shape = 1, layer.num_kv_heads, config.slots_per_block
            dims = (layer.head_dim,) if layer.values_in_keys else (layer.head_dim, layer.value_dim)
            caches = [_zeros((*shape, row_elements(dim, layer.cache_dtype)), layer.cache_dtype, device) for dim in dims]
            layer.bind(0, caches[0], caches[-1])
        layout = state_layout([layer.spec for layer in self._recurrent], [], config.slots_per_block)
        if layout is not None:
            self._places = [
                torch.zeros((1, layout.chunk_bytes), dtype=torch.uint8, device=device) for _ in range(layout.num_places)
            ]
            for recurrent in self._recurrent:
                recurrent.bind(layout, self._places)

    def context(self, num_tokens: int) -> ForwardContext:
        """Of a step of so many tokens of prompts that are as long as they may be."""
        counts = [self._most_tokens] * (num_tokens // self._most_tokens)
        if num_tokens % self._most_tokens:
            counts.append(num_tokens % self._most_tokens)
        return self.context_of(counts, counts)

    def context_of(self, counts: list[int], lengths: list[int]) -> ForwardContext:
        """Of a step that computes so many tokens of each sequence, the last ones of its length."""
        counts_S = torch.tensor(counts, dtype=torch.int32, device=self._device)
        starts = torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=self._device)
        metadata: tuple[object, ...] = ()
        if self._layers:
            batch = AttentionBatch(
                query_starts_S1=starts,
                seq_lens_S=torch.tensor(lengths, dtype=torch.int32, device=self._device),
                block_tables_SM=counts_S.new_zeros((len(counts), self._blocks_per_row)),
                slots_T=torch.full((sum(counts),), -1, device=self._device),
                max_query_len=max(counts),
                max_seq_len=self._most_tokens,
            )
            assert self._layers[0].backend is not None, "load_model binds a backend"
            metadata = (self._layers[0].backend.build_metadata(batch),)
        states = None
        if self._places:
            tables = starts.new_zeros((len(counts), self._recurrent[0].num_blocks), dtype=torch.int64)
            on_host = HostSpans([*accumulate(counts, initial=0)], counts)
            states = StateBatch(
                self._places, tables, torch.zeros_like(counts_S).long(), counts_S.long(), starts, on_host=on_host
            )
        return ForwardContext(metadata, states)

    def let_go(self) -> None:
        for layer in self._layers:
            layer.group = -1
            layer.k_cache = None
            layer.v_cache = None
        for recurrent in self._recurrent:
            recurrent.places = []


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).view(torch.uint8).zero_().view(dtype)


def scratch_cache(model: object, config: WorkerConfig, device: torch.device) -> ScratchCache | None:
    """None where no backend computes attention, as for what only stands in for a model."""
    if not isinstance(model, nn.Module):
        return None
    layers = attention_layers(model).values()
    if not all(layer.backend is not None for layer in layers) or not (layers or recurrent_layers(model)):
        return None
    return ScratchCache(model, config, device)
