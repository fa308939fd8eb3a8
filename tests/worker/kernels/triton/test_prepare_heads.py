"""Norms of heads, positions and the write into the cache as one kernel: what the specification says, one after the
other; and a layer that has its backend do it."""

import itertools

import pytest
import torch

from quire.testing.attention_cases import DTYPES
from quire.testing.kernel_contracts import assert_close
from quire.worker.attention import Attention, AttentionBatch, Heads
from quire.worker.attention.reference import ReferenceBackend
from quire.worker.attention.triton import TritonBackend
from quire.worker.forward_context import ForwardContext, forward_context
from quire.worker.kernels import reference
from quire.worker.kernels.cache_format import decoded, row_elements
from quire.worker.layers import RMSNorm, RotaryEmbedding

HEADS, KV_HEADS, BLOCK = 5, 2, 4


def inputs(dtype, head_dim, rotary_dim, value_dim, num_tokens, has_norms):
    random = torch.Generator().manual_seed(head_dim)
    # query, key and value are slices of one fused tensor
    width = (HEADS + KV_HEADS) * head_dim + KV_HEADS * value_dim
    fused = torch.randn(num_tokens, width, generator=random).to(dtype)
    query, key, value = fused.split([HEADS * head_dim, KV_HEADS * head_dim, KV_HEADS * value_dim], dim=1)
    angle = torch.arange(50)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    weights = [torch.randn(head_dim, generator=random).to(dtype) if has_norms else None for _ in range(2)]
    return (
        torch.randint(0, 50, (num_tokens,), generator=random),
        query.view(num_tokens, HEADS, head_dim),
        key.view(num_tokens, KV_HEADS, head_dim),
        value.view(num_tokens, KV_HEADS, value_dim),
        *weights,
        1e-6,
        torch.cat((angle.cos(), angle.sin()), -1),
    )


def caches(dtype, *dims):
    made = [torch.empty(6, 3, KV_HEADS, BLOCK, row_elements(dim, dtype), dtype=dtype) for dim in dims]
    for cache in made:
        cache.view(torch.uint8).fill_(5)
    return [cache[:, 1] for cache in made]


@pytest.mark.parametrize(("head_dim", "rotary_dim", "value_dim"), [(64, 64, 64), (80, 32, 24), (24, 4, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_specification(triton_kernels, dtype, head_dim, rotary_dim, value_dim):
    slots = torch.tensor([3, -1, 17, 4, 22])
    for has_norms, is_interleaved in itertools.product((False, True), repeat=2):
        for cache_dtype in (dtype, torch.int8):
            results = []
            for home in (triton_kernels, reference):
                given = inputs(dtype, head_dim, rotary_dim, value_dim, len(slots), has_norms)
                own = caches(cache_dtype, head_dim, value_dim)
                home.prepare_heads(*given, is_interleaved, *own, slots)
                results.append((*given[1:4], *own))
            (*heads, k_cache, v_cache), (*expected_heads, expected_k, expected_v) = results
            for mine, theirs in zip(heads, expected_heads, strict=True):
                assert_close(mine, theirs, factor=2)
            used = torch.tensor([0, 4, 1, 5])
            for mine, theirs in ((k_cache, expected_k), (v_cache, expected_v)):
                untouched = torch.tensor([2, 3])
                assert torch.equal(mine[untouched].view(torch.uint8), theirs[untouched].view(torch.uint8))
                # codes of numbers that are rounded otherwise are neighbours
                bound = 0.05 if cache_dtype == torch.int8 else 0.03
                torch.testing.assert_close(decoded(mine, used), decoded(theirs, used), rtol=bound, atol=bound)


def test_no_tokens(triton_kernels):
    given = inputs(torch.bfloat16, 64, 64, 64, 0, has_norms=True)
    own = caches(torch.bfloat16, 64, 64)
    triton_kernels.prepare_heads(*given, False, *own, torch.tensor([], dtype=torch.int64))
    assert all((cache.view(torch.uint8) == 5).all() for cache in own)


def attended(backend, has_norms):
    """What a layer of a step of two sequences says, with a backend."""
    random = torch.Generator().manual_seed(1)
    layer = Attention(4, 2, 16, 0.25, name="layer")
    cache = torch.randn(5, 2, BLOCK, 16, generator=random)
    layer.bind(0, cache, cache.clone())
    layer.backend = backend
    norms = [RMSNorm(16), RMSNorm(16)] if has_norms else [None, None]
    for norm in norms:
        if norm is not None:
            norm.weight.data.copy_(torch.randn(16, generator=random))
    frequencies = 1.0 / 10 ** (torch.arange(0, 16, 2) / 16)
    batch = AttentionBatch(
        query_starts_S1=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens_S=torch.tensor([7, 5], dtype=torch.int32),
        block_tables_SM=torch.tensor([[3, 1], [0, 4]], dtype=torch.int32),
        slots_T=torch.tensor([4, 5, 6, 16]),
        max_query_len=3,
        max_seq_len=7,
    )
    heads = Heads(RotaryEmbedding(frequencies, 20), torch.tensor([4, 5, 6, 4]), *norms)
    query, key, value = torch.randn(4, 128, generator=random).split([64, 32, 32], dim=1)
    with torch.inference_mode(), forward_context(ForwardContext((batch,))):
        return layer(query, key, value, heads), layer.k_cache, layer.v_cache


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_layer_gets_from_its_backend_what_it_would_do_itself(triton_kernels, monkeypatch, has_norms):
    called = []
    prepare = TritonBackend.prepare_heads
    monkeypatch.setattr(TritonBackend, "prepare_heads", lambda *given: (called.append(1), prepare(*given)))
    found = attended(TritonBackend(), has_norms)
    assert called
    for mine, theirs in zip(found, attended(ReferenceBackend(), has_norms), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
