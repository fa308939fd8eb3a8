"""Runs a model without engine or runner: caches, block tables and attention batches made by hand.

What the engine does over many steps stands here in a few lines, so that a model can be compared with its original and
with itself: any mix of sequences, any cut into chunks, blocks in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import WorkerConfig
from quire.state_layout import state_layout
from quire.worker.attention import Attention, AttentionBatch, attention_layers
from quire.worker.forward_context import ForwardContext, forward_context
from quire.worker.kernels.cache_format import row_elements
from quire.worker.state_cache import StateBatch, recurrent_layers


def worker_config(path: Path, **changes: Any) -> WorkerConfig:
    """A small configuration for a checkpoint: float32 on the CPU, reference attention."""
    values: dict[str, Any] = {
        "model_path": str(path),
        "device": "cpu",
        "dtype": "float32",
        "model_impl": "auto",
        "load_format": "auto",
        "trust_remote_code": False,
        "max_model_len": 256,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.9,
        "attention_backend": "reference",
        "num_threads": 1,
        "compile": False,
        "enforce_eager": False,
        "seed": 0,
    }
    return WorkerConfig(**{**values, **changes})


NO_DRAFTS: Mapping[int, int] = MappingProxyType({})


class ModelHarness:
    """A loaded model with a cache of its own, and sequences that grow by chunks."""

    def __init__(self, model: nn.Module, *, block_size: int = 4, num_blocks: int = 256, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.generator = torch.Generator().manual_seed(seed)
        layers = list(attention_layers(model).values())
        self.device = next(model.parameters()).device
        self.groups = _groups(layers)
        for group, members in enumerate(self.groups):
            for layer in members:
                layer.bind(group, *_caches(layer, num_blocks, block_size, self.device))
        self._open_states(num_blocks)
        # Blocks in random order: a table that is accidentally read as a range must fail.
        self._free = [torch.randperm(num_blocks, generator=self.generator).tolist() for _ in self.groups]
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.tables: dict[int, list[list[int]]] = defaultdict(lambda: [[] for _ in self.groups])

    @torch.inference_mode()
    def step(
        self,
        chunks: dict[int, Sequence[int]],
        num_drafts: Mapping[int, int] = NO_DRAFTS,
        wanted: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """New tokens by sequence, computed together; logits of all of them by sequence.

        `num_drafts`: so many of a sequence's new tokens, the last ones, are not kept. `wanted`: the tokens of the step
        whose logits are looked at, if not all."""
        starts, ids, positions = [0], list[int](), list[int]()
        for sequence, chunk in chunks.items():
            first = len(self.tokens[sequence])
            self.tokens[sequence] += chunk
            ids += list(chunk)
            positions += range(first, first + len(chunk))
            starts.append(len(ids))
            self._grow(sequence)
        states = self._state_batch(list(chunks), starts, num_drafts)
        metadata = tuple(self._metadata(group, list(chunks), starts) for group in range(len(self.groups)))
        wanted_n = None if wanted is None else self._tensor(wanted)
        with forward_context(ForwardContext(metadata, states, wanted_n=wanted_n)):
            hidden = self.model(self._tensor(ids), self._tensor(positions))
        logits = self.model.compute_logits(hidden).to(torch.float32, copy=True)
        for sequence in chunks:
            self._drop(sequence, num_drafts.get(sequence, 0))
        return {
            sequence: logits[begin:end] for sequence, begin, end in zip(chunks, starts[:-1], starts[1:], strict=True)
        }

    def run(self, sequence: int, tokens: Sequence[int], chunk_size: int | None = None) -> Tensor:
        """All logits of one sequence, in chunks of this size."""
        size = chunk_size or len(tokens)
        return torch.cat(
            [self.step({sequence: tokens[begin : begin + size]})[sequence] for begin in range(0, len(tokens), size)]
        )

    def step_back(self, sequence: int) -> None:
        """The next chunk of this sequence begins with its last token, computed once more."""
        self._drop(sequence, 1)

    def _drop(self, sequence: int, count: int) -> None:
        tokens = self.tokens[sequence]
        del tokens[len(tokens) - count :]

    def _grow(self, sequence: int) -> None:
        needed = -(-len(self.tokens[sequence]) // self.block_size)
        for table, free in zip(self.tables[sequence], self._free, strict=True):
            while len(table) < needed:
                table.append(free.pop())

    def _metadata(self, group: int, sequences: list[int], starts: list[int]) -> Any:
        tables = [self.tables[sequence][group] for sequence in sequences]
        lengths = [len(self.tokens[sequence]) for sequence in sequences]
        new = [end - begin for begin, end in pairwise(starts)]
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for table, length, count in zip(tables, lengths, new, strict=True)
            for position in range(length - count, length)
        ]
        width = max(len(table) for table in tables)
        batch = AttentionBatch(
            query_starts_S1=self._tensor(starts).int(),
            seq_lens_S=self._tensor(lengths).int(),
            block_tables_SM=self._tensor([table + [0] * (width - len(table)) for table in tables]).int(),
            slots_T=self._tensor(slots),
            max_query_len=max(new),
            max_seq_len=max(lengths),
        )
        backend = self.groups[group][0].backend
        assert backend is not None, "load_model binds a backend"
        return backend.build_metadata(batch)

    def _open_states(self, num_sequences: int) -> None:
        """Recurrent layers have a pool of their own here, in which a sequence has the blocks of its number."""
        layers = recurrent_layers(self.model)
        self._layout = state_layout([layer.spec for layer in layers.values()], [], self.block_size)
        if self._layout is None:
            return
        sizes = (num_sequences, self._layout.chunk_bytes)
        # Not zeros: what nobody has written must not be read.
        self._places = [torch.full(sizes, 0xFF, dtype=torch.uint8) for _ in range(self._layout.num_places)]
        for layer in layers.values():
            layer.bind(self._layout, self._places)

    def _state_batch(self, sequences: list[int], starts: list[int], num_drafts: Mapping[int, int]) -> StateBatch | None:
        if self._layout is None:
            return None
        new = [end - begin for begin, end in pairwise(starts)]
        first = [len(self.tokens[sequence]) - count for sequence, count in zip(sequences, new, strict=True)]
        kept = [count - num_drafts.get(sequence, 0) for sequence, count in zip(sequences, new, strict=True)]
        tables = self._tensor(sequences).unsqueeze(1).repeat(1, self._layout.num_blocks)
        return StateBatch(self._places, tables, self._tensor(first), self._tensor(kept), self._tensor(starts).int())

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _groups(layers: list[Attention]) -> list[list[Attention]]:
    groups: dict[Any, list[Attention]] = defaultdict(list)
    for layer in layers:
        spec = layer.spec
        groups[(spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.sliding_window, spec.is_chunked)].append(layer)
    return list(groups.values())


def _caches(layer: Attention, num_blocks: int, block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # NaN: what nobody has written must not be read.
    dtype, shape = layer.cache_dtype, (num_blocks, layer.num_kv_heads, block_size)
    caches = []
    for dim in (layer.head_dim, layer.value_dim)[: 1 if layer.values_in_keys else 2]:
        cache = torch.empty((*shape, row_elements(dim, dtype)), dtype=dtype, device=device)
        cache.view(torch.uint8).fill_(0xFF)
        caches.append(cache)
    return caches[0], caches[-1]
