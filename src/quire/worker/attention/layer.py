"""Attention, as the author of a model writes it: `Attention(...)` in the constructor, `self.attn(q, k, v)` in forward.

Owns: the description of the layer and its place in the KV cache. Must never: look at a batch itself; that is what the
backend does with the metadata of the forward context. The call is one opaque operator, so torch.compile sees neither
the cache nor the metadata (4.3.1, Operation Fusion).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.messages import SOURCE, LayerSpec
from quire.worker.attention.backend import STEP_BLOCK, AttentionBackend, AttentionBatch, AttentionSpec
from quire.worker.attention.heads import Heads
from quire.worker.forward_context import current_forward_context, is_traced
from quire.worker.kernels.cache_format import SCALE_BYTES, has_scales, row_elements
from quire.worker.layers.ranks import current_group, current_ranks

# The operator gets a number, because a tensor operator cannot take a module. A number is never used twice.
_layers: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
_next_index = 0


class Attention(nn.Module):
    """Causal attention of each sequence's new tokens over all its tokens, whose keys and values are kept in blocks.

    Where it is not causal, sequences are computed whole, their tokens see each other, and nothing is kept.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        name: str,
        sliding_window: int = 0,
        is_chunked: bool = False,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
        values_in_keys: bool = False,
        slopes: Tensor | None = None,
        is_causal: bool = True,
        bias: Tensor | None = None,
        part: str = "",
    ) -> None:
        """`slopes`: of ALiBi, one a head of the whole model (`layers/alibi.py`).
        `bias`: of relative positions, for each head of this rank (`layers/relative_bias.py`).

        `part`: of a model whose sequences begin with a source, which an encoder reads. Cross attention is of the
        SOURCE: keys and values of these tokens are given to `store`, and all tokens behind them see them, and nothing
        else. To a layer that is of the TEXT only the tokens behind them come, and see no others.

        `values_in_keys`: a value is the first `value_dim` numbers of its key, and no value is given or kept.

        `is_chunked`: the window does not slide. A token sees, up to itself, its own chunk of `sliding_window` tokens.
        A window of one that is not causal reaches as far ahead as back.
        """
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"{name}: num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}")
        if values_in_keys and not 1 <= (value_dim or head_dim) <= head_dim:
            raise ValueError(f"{name}: value_dim={value_dim} is no part of keys of {head_dim}")
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.values_in_keys = values_in_keys
        self.scale = scale
        # tokens that a token sees, itself included; 0 means all
        self.sliding_window = sliding_window
        self.is_chunked = is_chunked and sliding_window > 0
        self.soft_cap = soft_cap
        self.sinks = sinks
        self.slopes: Tensor | None
        own = None if slopes is None else current_group().slice_of(slopes.float(), 0).to(torch.get_default_device())
        self.register_buffer("slopes", own, persistent=False)
        # the workers that share the keys and values of each sequence: each keeps every size-th position
        self.ranks = current_ranks().context
        self.is_causal = is_causal
        self.bias = bias
        self.part = part
        if part and self.ranks.size > 1:
            raise ModelError(
                f"context_parallel_size={self.ranks.size}: workers cannot share the keys of what an encoder made. Use "
                "tensor_parallel_size, or leave it out."
            )
        if not is_causal and self.ranks.size > 1:
            raise ModelError(
                f"context_parallel_size={self.ranks.size}: the tokens of this model see each other, and no keys are "
                "kept that workers could share. Use tensor_parallel_size, or leave it out."
            )
        # the type that the model is built in
        self.dtype = torch.get_default_dtype()
        # what keys and values are kept as; `bind_backend` may change it
        self.cache_dtype = self.dtype
        self.backend: AttentionBackend | None = None
        self.group = -1
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.index = _number(self)

    @property
    def spec(self) -> LayerSpec:
        """What this layer keeps per token, as the engine core groups layers by it."""
        return LayerSpec(
            name=self.name,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=0 if self.values_in_keys else self.value_dim,
            bytes_per_element=self.cache_dtype.itemsize,
            scale_bytes=(1 if self.values_in_keys else 2) * SCALE_BYTES if has_scales(self.cache_dtype) else 0,
            sliding_window=self.sliding_window,
            is_chunked=self.is_chunked,
            part=self.part,
        )

    def attention_spec(self, block_size: int, device_type: str) -> AttentionSpec:
        """What a backend must know to say whether it can serve this layer."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.value_dim,
            block_size=block_size,
            dtype=self.dtype,
            device_type=device_type,
            cache_dtype=self.cache_dtype,
            sliding_window=self.sliding_window,
            is_chunked=self.is_chunked,
            soft_cap=self.soft_cap,
            has_sinks=self.sinks is not None,
            has_slopes=self.slopes is not None,
            is_causal=self.is_causal,
            has_bias=self.bias is not None,
            is_crossing=self.part == SOURCE,
            values_in_keys=self.values_in_keys,
        )

    def bind(self, group: int, k_cache: Tensor, v_cache: Tensor) -> None:
        """Its cache, [num_blocks, num_kv_heads, block_size, dim], and the index of its group's metadata.

        That of values is that of keys where values are parts of keys.
        """
        if (v_cache is k_cache) is not self.values_in_keys:
            raise ValueError(f"{self.name}: one cache for keys and values goes with values_in_keys alone")
        value_row = self.head_dim if self.values_in_keys else self.value_dim
        for cache, dim in ((k_cache, self.head_dim), (v_cache, value_row)):
            width = row_elements(dim, self.cache_dtype)
            if cache.ndim != 4 or cache.shape[1] != self.num_kv_heads or cache.shape[3] != width:
                raise ValueError(f"{self.name}: cache {tuple(cache.shape)} is not [*, {self.num_kv_heads}, *, {width}]")
            if cache.dtype != self.cache_dtype:
                raise ValueError(f"{self.name}: cache of {cache.dtype}, not {self.cache_dtype}")
        self.group = group
        self.k_cache = k_cache
        self.v_cache = v_cache

    def caches(self, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Where keys and values are written and read in a call: its cache, or memory for this call alone."""
        if self.is_causal:
            assert self.k_cache is not None
            assert self.v_cache is not None
            return self.k_cache, self.v_cache
        shape = batch.num_step_blocks, self.num_kv_heads, STEP_BLOCK
        device = batch.slots_T.device
        k_cache, v_cache = (
            torch.empty((*shape, dim), dtype=self.dtype, device=device) for dim in (self.head_dim, self.value_dim)
        )
        return k_cache, v_cache

    def forward(
        self,
        query_TF: Tensor,
        key_TF: Tensor | None = None,
        value_TF: Tensor | None = None,
        heads: Heads | None = None,
    ) -> Tensor:
        """Heads flattened in and out: [T, H*D], [T, K*D], [T, K*E] -> [T, H*E]. No values where they are in keys.

        Without keys it reads what it was given for these tokens before: a later layer of a model may look at the keys
        and values of this one. With `heads` queries and keys are what was projected.
        """
        if heads is not None and key_TF is not None:
            if value_TF is not None and self._has_prepared(heads, query_TF, key_TF, value_TF):
                key_TF = value_TF = None
            else:
                query_TF, key_TF = heads.apply(query_TF, key_TF, self.head_dim)
        query_THD = query_TF.view(-1, self.num_heads, self.head_dim)
        key_TKD = None if key_TF is None else key_TF.view(-1, self.num_kv_heads, self.head_dim)
        value_TKE = None if value_TF is None else value_TF.view(-1, self.num_kv_heads, self.value_dim)
        out_THE = query_TF.new_empty((query_THD.shape[0], self.num_heads, self.value_dim))
        _operator(query_THD, key_TKD, value_TKE, out_THE, self.index)
        return out_THE.view(-1, self.num_heads * self.value_dim)

    def store(self, key_TF: Tensor, value_TF: Tensor) -> None:
        """Keys and values of those tokens of the step that an encoder made: for layers of the source."""
        context = current_forward_context()
        if context.is_profiling:
            return
        store = getattr(self.backend, "store", None)
        if store is None or self.k_cache is None:
            raise RuntimeError(f"{self.name}: keys were given before a backend and a cache were bound")
        key_TKD = key_TF.view(-1, self.num_kv_heads, self.head_dim)
        value_TKE = value_TF.view(-1, self.num_kv_heads, self.value_dim)
        store(self, key_TKD, value_TKE, context.metadata[self.group])

    def _has_prepared(self, heads: Heads, query_TF: Tensor, key_TF: Tensor, value_TF: Tensor) -> bool:
        """Whether the backend has done it all, the write into the cache included."""
        if is_traced() or torch.is_grad_enabled() or not heads.is_one_kernel(query_TF.dtype):
            return False
        prepare = getattr(self.backend, "prepare_heads", None)
        if prepare is None or self.k_cache is None or self.ranks.size > 1:
            return False
        context = current_forward_context()
        if context.is_profiling:
            return False
        query_THD = query_TF.view(-1, self.num_heads, self.head_dim)
        key_TKD = key_TF.view(-1, self.num_kv_heads, self.head_dim)
        value_TKE = value_TF.view(-1, self.num_kv_heads, self.value_dim)
        prepare(self, heads, query_THD, key_TKD, value_TKE, context.metadata[self.group])
        return True

    def extra_repr(self) -> str:
        kind = "chunks of " if self.is_chunked else "sliding_window="
        window = f", {kind}{self.sliding_window}" if self.sliding_window else ""
        return f"{self.num_heads} heads over {self.num_kv_heads} of {self.head_dim}{window}"


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """The attention layers of a model that have a cache, by name, in the model's order."""
    found: dict[str, Attention] = {}
    for module in model.modules():
        if isinstance(module, Attention) and module.is_causal:
            if module.name in found:
                raise ValueError(f"{module.name}: two attention layers have this name")
            found[module.name] = module
    return found


def encoding_layers(model: nn.Module) -> list[Attention]:
    """Those that have none, because tokens see each other."""
    return [module for module in model.modules() if isinstance(module, Attention) and not module.is_causal]


def layer_of(index: int) -> Attention:
    """The layer that an operator's number stands for."""
    return _layers[index]


def _number(layer: Attention) -> int:
    global _next_index
    index = _next_index
    _next_index += 1
    _layers[index] = layer
    return index


def _attention(
    query_THD: Tensor, key_TKD: Tensor | None, value_TKE: Tensor | None, out_THE: Tensor, layer_index: int
) -> None:
    layer = _layers[layer_index]
    context = current_forward_context()
    if context.is_profiling:
        out_THE.zero_()
        return
    if layer.backend is None or (layer.is_causal and layer.k_cache is None):
        raise RuntimeError(f"{layer.name}: attention was called before a backend and a cache were bound")
    layer.backend.forward(layer, query_THD, key_TKD, value_TKE, context.metadata[layer.group], out_THE)


# Library.define/impl costs 1.6 us a call, torch.library.custom_op 8 us; the number is symbolic, so that layers which
# are compiled one by one share one artefact.
_library = torch.library.Library("quire", "FRAGMENT")
_library.define("attention(Tensor query, Tensor? key, Tensor? value, Tensor(a!) out, SymInt layer) -> ()")
_library.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("quire::attention", lambda query, key, value, out, layer: None, lib=_library)
# Bound once: looking an operator up costs more than calling it.
_operator = torch.ops.quire.attention.default
