"""The example of a backend from outside: what it tells FlashInfer is a step, and it refuses what that does not know."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire.worker.attention import Attention, AttentionBatch
from quire.worker.kernels import reference

FILE = Path(__file__).parents[3] / "examples" / "flashinfer_backend" / "quire_flashinfer.py"
BLOCK = 4
LENGTHS = (7, 5)
COUNTS = (3, 1)


class StandIn:
    """FlashInfer's wrapper, as far as the example uses it, computed by the reference."""

    plans = 0

    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(self, starts, first_blocks, blocks, last_lengths, *sizes, sm_scale, window_left, logits_soft_cap, **types):
        assert sizes == (4, 2, 16, BLOCK)
        assert types["causal"]
        StandIn.plans += 1
        counts = first_blocks.diff()
        tables = torch.full((len(counts), int(counts.max())), 2**30, dtype=torch.int32)
        for number, row in enumerate(blocks.split(counts.tolist())):
            tables[number, : len(row)] = row
        lengths = (counts - 1) * BLOCK + last_lengths
        self.batch = tables, lengths, starts
        self.softmax = sm_scale, window_left + 1, False, logits_soft_cap or 0.0

    def run(self, query, caches, out):
        assert len(query) == len(out) == sum(COUNTS)
        reference.paged_attention(query, *caches, *self.batch, out, None, None, *self.softmax)


@pytest.fixture
def example(monkeypatch):
    stand_in = ModuleType("flashinfer")
    stand_in.BatchPrefillWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    spec = importlib.util.spec_from_file_location("quire_flashinfer", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def a_layer(**options):
    layer = Attention(4, 2, 16, 0.25, name=f"a{options}", **options)
    cache = torch.full((5, 2, BLOCK, 16), torch.nan)
    layer.bind(0, cache, cache.clone())
    return layer


def a_batch():
    return AttentionBatch(
        query_starts_S1=torch.tensor([0, 3, 4], dtype=torch.int32),
        seq_lens_S=torch.tensor(LENGTHS, dtype=torch.int32),
        block_tables_SM=torch.tensor([[3, 1, 9], [0, 4, 9]], dtype=torch.int32),
        slots_T=torch.tensor([4, 5, 6, 16]),
        max_query_len=3,
        max_seq_len=7,
    )


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"soft_cap": 5.0}], ids=str)
def test_a_step_is_what_the_reference_says(example, options):
    backend, batch, layer = example.FlashInferBackend(), a_batch(), a_layer(**options)
    random = torch.Generator().manual_seed(3)
    # what came before
    for cache in (layer.k_cache, layer.v_cache):
        cache[:] = torch.randn(cache.shape, generator=random)
    # a row behind the last sequence pads the step
    query = torch.randn(5, 4, 16, generator=random)
    key, value = torch.randn(2, 4, 2, 16, generator=random)
    found = torch.full_like(query, 7.0)
    StandIn.plans = 0
    metadata = backend.build_metadata(batch)
    backend.forward(layer, query, key, value, metadata, found)
    backend.forward(layer, query, None, None, metadata, found)
    assert StandIn.plans == 1, "layers that are alike share a plan"
    expected = torch.full_like(query, 7.0)
    softmax = layer.scale, layer.sliding_window, False, layer.soft_cap
    tables = batch.block_tables_SM, batch.seq_lens_S, batch.query_starts_S1
    reference.paged_attention(query, layer.k_cache, layer.v_cache, *tables, expected, None, None, *softmax)
    assert torch.equal(layer.k_cache[1, :, :3], key[:3].transpose(0, 1))
    torch.testing.assert_close(found[:4], expected[:4])
    assert (found[4] == 7.0).all()


def test_what_it_does_not_know_is_refused(example):
    backend = example.FlashInferBackend()
    spec = dataclasses.replace(a_layer().attention_spec(BLOCK, "cuda"), dtype=torch.bfloat16)
    assert backend.supports(spec) is None
    assert "not on cpu" in backend.supports(dataclasses.replace(spec, device_type="cpu"))
    assert "float32" in backend.supports(dataclasses.replace(spec, dtype=torch.float32))
    for field in ("has_sinks", "has_slopes", "has_bias", "is_chunked", "values_in_keys"):
        assert backend.supports(dataclasses.replace(spec, **{field: True}))
    ahead = backend.build_metadata(dataclasses.replace(a_batch(), ends_T=torch.tensor([7, 7, 7, 5])))
    with pytest.raises(RuntimeError, match="see ahead"):
        backend.forward(a_layer(), *(torch.zeros(1),) * 3, ahead, torch.zeros(1))
