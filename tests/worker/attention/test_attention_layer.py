from importlib.util import find_spec

import pytest
import torch
from torch import nn

from quire.errors import ModelError, OptionError
from quire.worker.attention import Attention, AttentionBatch, attention_layers, bind_backend
from quire.worker.attention.registry import backend_names, make_backend
from quire.worker.forward_context import (
    ForwardContext,
    current_forward_context,
    forward_context,
    profiling_context,
)

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def layer(name="attn", **options):
    return Attention(HEADS, KV_HEADS, DIM, DIM**-0.5, name=name, **options)


def batch_of(length):
    """One sequence of new tokens, in blocks 3, 1, 2, ..."""
    table = [3, 1, 2, 0][: -(-length // BLOCK)]
    return AttentionBatch(
        query_starts_S1=torch.tensor([0, length], dtype=torch.int32),
        seq_lens_S=torch.tensor([length], dtype=torch.int32),
        block_tables_SM=torch.tensor([table], dtype=torch.int32),
        slots_T=torch.tensor([table[position // BLOCK] * BLOCK + position % BLOCK for position in range(length)]),
        max_query_len=length,
        max_seq_len=length,
    )


def inputs(length, value_dim=DIM):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, heads * dim, generator=generator)
        for heads, dim in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim))
    ]


def bind(attn, backend="reference", value_dim=DIM):
    model = nn.ModuleList([attn])
    bind_backend(model, backend, BLOCK, "cpu")
    attn.bind(0, torch.zeros(4, KV_HEADS, BLOCK, DIM), torch.zeros(4, KV_HEADS, BLOCK, value_dim))


def run(attn, tensors):
    metadata = attn.backend.build_metadata(batch_of(len(tensors[0])))
    with forward_context(ForwardContext((metadata,))):
        return attn(*tensors)


def dense(tensors, *, window=0, value_dim=DIM):
    query, key, value = (
        tensor.view(len(tensor), -1, dim).transpose(0, 1)
        for tensor, dim in zip(tensors, (DIM, DIM, value_dim), strict=True)
    )
    length = query.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < window if window else True)
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("value_dim", [8, 12])
def test_it_computes_attention(backend, window, value_dim):
    attn = layer(sliding_window=window, value_dim=value_dim)
    bind(attn, backend, value_dim)
    tensors = inputs(13, value_dim)
    expected = dense(tensors, window=window, value_dim=value_dim)
    torch.testing.assert_close(run(attn, tensors), expected, atol=1e-5, rtol=1e-5)


def test_inputs_may_be_pieces_of_one_tensor():
    attn = layer()
    bind(attn, "auto")
    tensors = inputs(6)
    pieces = torch.cat(tensors, dim=-1).split([tensor.shape[1] for tensor in tensors], dim=-1)
    torch.testing.assert_close(run(attn, pieces), run(attn, tensors))


def test_the_spec_says_what_a_layer_keeps():
    spec = layer(sliding_window=5, value_dim=6).spec
    assert (spec.name, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.sliding_window) == ("attn", 2, 8, 6, 5)
    assert spec.bytes_per_token == 2 * (8 + 6) * 4


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_values_may_be_parts_of_keys(backend):
    attn = Attention(HEADS, KV_HEADS, DIM, DIM**-0.5, name="attn", value_dim=5, values_in_keys=True)
    assert attn.attention_spec(BLOCK, "cpu").values_in_keys
    assert (attn.spec.value_dim, attn.spec.bytes_per_token) == (0, 2 * 8 * 4)
    bind_backend(nn.ModuleList([attn]), backend, BLOCK, "cpu")
    cache = torch.zeros(4, KV_HEADS, BLOCK, DIM)
    with pytest.raises(ValueError, match="attn: one cache"):
        attn.bind(0, cache, torch.zeros_like(cache))
    with pytest.raises(ValueError, match="one cache"):
        layer().bind(0, cache, cache)
    attn.bind(0, cache, cache)
    query, key, _ = inputs(13)
    value = key.view(13, KV_HEADS, DIM)[..., :5].flatten(1)
    expected = dense([query, key, value], value_dim=5)
    torch.testing.assert_close(run(attn, [query, key]), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="value_dim=9 is no part of keys of 8"):
        layer(value_dim=9, values_in_keys=True)


def test_a_profiling_step_needs_no_cache():
    attn = layer()
    with forward_context(profiling_context()):
        assert torch.equal(attn(*inputs(3)), torch.zeros(3, HEADS * DIM))


def test_our_own_mistakes_are_loud():
    attn = layer()
    with pytest.raises(RuntimeError, match="no forward_context"):
        attn(*inputs(3))
    with forward_context(ForwardContext(())), pytest.raises(RuntimeError, match=r"attn: .* bound"):
        attn(*inputs(3))
    with pytest.raises(ValueError, match=r"attn: cache \(4, 4, 2, 8\)"):
        attn.bind(0, torch.zeros(4, BLOCK, KV_HEADS, DIM), torch.zeros(4, KV_HEADS, BLOCK, DIM))
    with pytest.raises(ValueError, match="two attention layers"):
        attention_layers(nn.ModuleList([layer("a"), layer("a")]))
    with pytest.raises(ValueError, match="num_heads=4"):
        Attention(4, 3, 8, 1.0, name="odd")


def test_a_context_is_never_nested_and_ends_with_its_step():
    with forward_context(profiling_context()):
        assert current_forward_context().is_profiling
        with pytest.raises(RuntimeError, match="already"), forward_context(ForwardContext(())):
            pass
    with pytest.raises(ZeroDivisionError), forward_context(ForwardContext(())):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="no forward_context"):
        current_forward_context()


def test_backends_are_found_by_name():
    assert backend_names()[:3] == ["cpu", "triton", "reference"]
    assert make_backend("reference").name == "reference"
    with pytest.raises(OptionError, match=r'Did you mean "reference"'):
        make_backend("refrence")


def test_a_backend_that_does_not_fit_is_refused_with_its_reason():
    with pytest.raises(ModelError, match="cpu: it computes on CPUs, not on cuda"):
        bind_backend(nn.ModuleList([layer()]), "cpu", BLOCK, "cuda")
    expected = "triton" if find_spec("triton") else "reference"
    assert bind_backend(nn.ModuleList([layer()]), "auto", BLOCK, "cuda").name == expected


def test_a_backend_of_another_package_is_found(tmp_path, monkeypatch):
    (tmp_path / "toy_attention.py").write_text(
        "from quire.worker.attention.reference import ReferenceBackend\n"
        "class Toy(ReferenceBackend):\n"
        "    name = 'toy'\n"
        "    def supports(self, spec):\n"
        "        return 'it knows no windows' if spec.sliding_window else None\n"
    )
    info = tmp_path / "toy_attention-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-attention\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.attention_backends]\ntoy = toy_attention:Toy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    attn = layer()
    assert bind_backend(nn.ModuleList([attn]), "toy", BLOCK, "cpu").name == "toy"
    with pytest.raises(ModelError, match="toy: it knows no windows"):
        bind_backend(nn.ModuleList([layer(sliding_window=3)]), "toy", BLOCK, "cpu")
