"""Steps of whole sequences, from position 0 to their ends: what training computes.

There is nothing before them and nothing after, so the cache is scratch memory: all layers of one shape share it, each
writes before it reads, and the next step writes over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.state_layout import state_layout
from quire.worker.attention import Attention, AttentionBatch, attention_layers
from quire.worker.forward_context import ForwardContext
from quire.worker.kernels.cache_format import row_elements
from quire.worker.state_cache import StateBatch, recurrent_layers


@dataclass(frozen=True)
class Step:
    """Inputs and context of one. Suffix T: tokens of all sequences, one sequence after the other."""

    input_ids_T: Tensor
    positions_T: Tensor
    context: ForwardContext


class WholeSequences:
    """Makes the steps of one model."""

    def __init__(self, model: nn.Module, block_size: int) -> None:
        self._block_size = block_size
        self._layers = list(attention_layers(model).values())
        self._recurrent = list(recurrent_layers(model).values())
        self._device = next(model.parameters()).device
        self._num_blocks = 0
        self._num_states = 0
        self._places: list[Tensor] = []
        self._num_state_blocks = 0

    def step(self, sequences: Sequence[Sequence[int]], *, adapter_slots: Sequence[int] | None = None) -> Step:
        """`adapter_slots`: of each sequence, -1 for none; without them no sequence has one."""
        lengths = [len(sequence) for sequence in sequences]
        blocks = [-(-length // self._block_size) for length in lengths]
        self._grow(sum(blocks), len(sequences))
        positions_T = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        owner_T = torch.repeat_interleave(self._tensor(range(len(lengths))), self._tensor(lengths))
        first_block_S = self._tensor([0, *accumulate(blocks)][:-1])
        starts_S1 = self._tensor([0, *accumulate(lengths)]).int()
        batch = AttentionBatch(
            query_starts_S1=starts_S1,
            seq_lens_S=self._tensor(lengths).int(),
            block_tables_SM=(first_block_S[:, None] + torch.arange(max(blocks), device=self._device)).int(),
            slots_T=first_block_S[owner_T] * self._block_size + positions_T,
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
        )
        backend = self._layers[0].backend if self._layers else None
        metadata = (backend.build_metadata(batch),) if backend is not None else ()
        slots_T = None if adapter_slots is None else self._tensor(adapter_slots).int()[owner_T]
        context = ForwardContext(metadata, self._states(lengths, starts_S1), adapter_slots=slots_T)
        ids = [token for sequence in sequences for token in sequence]
        return Step(self._tensor(ids), positions_T, context)

    def _grow(self, num_blocks: int, num_sequences: int) -> None:
        if num_blocks > self._num_blocks:
            self._num_blocks = num_blocks
            caches: dict[Any, tuple[Tensor, Tensor]] = {}
            for layer in self._layers:
                shape = layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.values_in_keys, layer.cache_dtype
                if shape not in caches:
                    caches[shape] = self._caches(layer)
                layer.bind(0, *caches[shape])
        if self._recurrent and num_sequences > self._num_states:
            self._num_states = num_sequences
            layout = state_layout([layer.spec for layer in self._recurrent], [], self._block_size)
            assert layout is not None
            sizes = num_sequences, layout.chunk_bytes
            self._places = [
                torch.zeros(sizes, dtype=torch.uint8, device=self._device) for _ in range(layout.num_places)
            ]
            self._num_state_blocks = layout.num_blocks
            for recurrent in self._recurrent:
                recurrent.bind(layout, self._places)

    def _caches(self, layer: Attention) -> tuple[Tensor, Tensor]:
        sizes = self._num_blocks, layer.num_kv_heads, self._block_size
        dtype = layer.cache_dtype
        keys = torch.zeros((*sizes, row_elements(layer.head_dim, dtype)), dtype=dtype, device=self._device)
        if layer.values_in_keys:
            return keys, keys
        return keys, torch.zeros((*sizes, row_elements(layer.value_dim, dtype)), dtype=dtype, device=self._device)

    def _states(self, lengths: Sequence[int], starts_S1: Tensor) -> StateBatch | None:
        if not self._recurrent:
            return None
        # a sequence has the blocks of its number
        tables_Sn = self._tensor(range(len(lengths))).unsqueeze(1).repeat(1, self._num_state_blocks)
        return StateBatch(self._places, tables_Sn, self._tensor([0] * len(lengths)), self._tensor(lengths), starts_S1)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)


class PartsOneByOne(TorchFunctionMode):
    """Cuts tensors by one view for each part. PyTorch allows no part that came out of one call with others to be
    changed in place where gradients are asked for, and positions are turned into queries in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in ("split", "split_with_sizes", "chunk"):
            return func(*args, **keywords)
        tensor, sizes, dim = _of_cut(name, *args, **keywords)
        return tuple(
            tensor.narrow(dim, start, size) for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
        )


def _of_cut(
    name: str,
    tensor: Tensor,
    split_size: Any = None,
    dim: int = 0,
    *,
    chunks: int | None = None,
    split_size_or_sections: Any = None,
    split_sizes: Any = None,
) -> tuple[Tensor, list[int], int]:
    """The tensor, the sizes of its parts, and along which dimension."""
    how = next(one for one in (split_size, chunks, split_size_or_sections, split_sizes) if one is not None)
    total = tensor.shape[dim]
    if not isinstance(how, int):
        return tensor, list(how), dim
    step = -(-total // how) if name == "chunk" else how
    return tensor, [min(step, total - start) for start in range(0, total, step)], dim
