"""Each rank of a group holds its share; together they compute what one rank computes."""

import re

import pytest
import torch
import torch.nn.functional as F

from quire.errors import ModelError
from quire.worker.layers import (
    ColumnParallelLinear,
    LMHead,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    TensorParallelGroup,
    VocabEmbedding,
    load_weight,
    packing,
    tensor_parallel,
)
from quire.worker.layers.parameter import ShapeMismatchError, parts_of

IN, OUT = 12, 8


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def ranks(size, make):
    """The layer of each rank, and a reduction that sums what the ranks hand in."""
    layers = []
    for rank in range(size):
        with tensor_parallel(TensorParallelGroup(rank, size)):
            layers.append(make())
    return layers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_ranks_compute_parts_of_the_output(size):
    weight, bias, x = tensors((OUT, IN), (OUT,), (5, IN))
    layers = ranks(size, lambda: ColumnParallelLinear(IN, OUT))
    for layer in layers:
        load_weight(layer.weight, weight)
        load_weight(layer.bias, bias)
    torch.testing.assert_close(torch.cat([layer(x) for layer in layers], dim=-1), F.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_ranks_sum_up_and_add_the_bias_once(size):
    weight, bias, x = tensors((OUT, IN), (OUT,), (5, IN))
    parts = []
    for rank in range(size):

        def reduce(part, bias, dtype):
            # the last rank's adds what the ranks before it have handed in
            return sum(parts, start=part) + bias

        with tensor_parallel(TensorParallelGroup(rank, size, reduce)):
            layer = RowParallelLinear(IN, OUT)
        load_weight(layer.weight, weight)
        load_weight(layer.bias, bias)
        share = x.chunk(size, dim=-1)[rank]
        if rank < size - 1:
            parts.append(F.linear(share, layer.weight))
        else:
            torch.testing.assert_close(layer(share), F.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2])
def test_merged_columns_are_shared_out_one_by_one(size):
    gate, up, x = tensors((OUT, IN), (OUT * 2, IN), (5, IN))
    layers = ranks(size, lambda: MergedColumnParallelLinear(IN, [OUT, OUT * 2], bias=False))
    for layer in layers:
        load_weight(layer.weight, gate, 0)
        load_weight(layer.weight, up, 1)
        assert parts_of(layer.weight) == (0, 1)
    outputs = [layer(x).split(layer.sizes, dim=-1) for layer in layers]
    torch.testing.assert_close(torch.cat([pair[0] for pair in outputs], dim=-1), F.linear(x, gate))
    torch.testing.assert_close(torch.cat([pair[1] for pair in outputs], dim=-1), F.linear(x, up))


@pytest.mark.parametrize(("size", "kv_ranks"), [(1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1])])
def test_heads_are_shared_out_and_key_value_heads_are_repeated_if_there_are_too_few(size, kv_ranks):
    head_dim, num_heads, num_kv_heads = 3, 4, 2
    query, key, value, x = tensors(
        (num_heads * head_dim, IN), (num_kv_heads * head_dim, IN), (num_kv_heads * 3, IN), (5, IN)
    )
    layers = ranks(size, lambda: QKVParallelLinear(IN, head_dim, num_heads, num_kv_heads, bias=False))
    for rank, layer in enumerate(layers):
        assert layer.num_heads == num_heads // size
        for part, weight in zip("qkv", (query, key, value), strict=True):
            load_weight(layer.weight, weight, part)
        own = layer(x)
        width = layer.num_kv_heads * head_dim
        kv = slice(kv_ranks[rank] * width, (kv_ranks[rank] + 1) * width)
        torch.testing.assert_close(own[0], F.linear(x, query).chunk(size, dim=-1)[rank])
        torch.testing.assert_close(own[1], F.linear(x, key)[:, kv])
        torch.testing.assert_close(own[2], F.linear(x, value)[:, kv])


def test_sizes_that_cannot_be_shared_are_refused():
    with tensor_parallel(TensorParallelGroup(0, 3)), pytest.raises(ModelError, match="out_features=8"):
        ColumnParallelLinear(IN, OUT)


def test_a_tensor_of_the_wrong_shape_is_refused():
    layer = ReplicatedLinear(IN, OUT)
    with pytest.raises(ShapeMismatchError, match=r"\[8, 11\].*\[8, 12\]"):
        load_weight(layer.weight, torch.zeros(OUT, IN - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_a_packed_weight_gives_the_same_result(dtype, num_rows):
    weight, bias, x = (tensor.to(dtype) for tensor in tensors((OUT, IN), (OUT,), (num_rows, IN)))
    layer = ReplicatedLinear(IN, OUT).to(dtype)
    load_weight(layer.weight, weight)
    load_weight(layer.bias, bias)
    layer.pack_weights()
    if layer.packed is None:
        pytest.skip("no kernels in C++ here")
    assert layer.weight.numel() == 0
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(layer(x).float(), expected, atol=1e-5 if dtype == torch.float32 else 5e-2, rtol=1e-2)
    layer.pack_weights()  # a second time changes nothing
    assert layer(x).shape == (num_rows, OUT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_hands_its_packed_weight_to_the_embedding(dtype):
    (weight,) = tensors((40, IN))
    embedding = VocabEmbedding(40, IN).to(dtype)
    load_weight(embedding.weight, weight)
    head = LMHead(40, IN, tied_to=embedding)
    ids, hidden = torch.tensor([3, 39, 0, 3]), weight[:2].to(dtype)
    rows, logits = embedding(ids), head(hidden)
    head.pack_weights()
    if head.packed is None:
        pytest.skip("no kernels in C++ here")
    assert embedding.weight.numel() == head.weight.numel() == 0
    assert embedding.packed is head.packed
    assert torch.equal(embedding(ids), rows)
    torch.testing.assert_close(head(hidden), logits)
    assert not [name for name, _ in head.named_modules() if name], "the embedding is no part of the head"


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_a_vocabulary_that_they_cannot_divide_evenly(size, is_packed):
    weight, hidden = tensors((41, IN), (5, IN))
    ids = torch.tensor([40, 0, 13, 14, 27, 28, 20])
    rows, logits = [], []
    for rank in range(size):

        def gather(own, total):
            logits.append(own)
            return torch.cat(logits, dim=-1)

        def reduce(part):
            rows.append(part)
            return sum(rows)

        with tensor_parallel(TensorParallelGroup(rank, size, reduce, gather)):
            embedding = VocabEmbedding(41, IN)
            head = LMHead(41, IN, tied_to=embedding)
        load_weight(embedding.weight, weight)
        if is_packed:
            head.pack_weights()
        last_rows, last_logits = embedding(ids), head(hidden)
    assert torch.equal(last_rows, weight[ids])
    torch.testing.assert_close(last_logits, F.linear(hidden, weight))
    with pytest.raises(ShapeMismatchError, match=re.escape("[42, 12] in the checkpoint")):
        load_weight(VocabEmbedding(41, IN).weight, torch.zeros(42, IN))


def test_a_packed_layer_can_be_compiled():
    weight, x = tensors((OUT, IN), (5, IN))
    layer = ReplicatedLinear(IN, OUT, bias=False)
    load_weight(layer.weight, weight)
    layer.pack_weights()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (x, x[:2], x[:1]):
        torch.testing.assert_close(compiled(rows), F.linear(rows, weight))


def test_without_kernels_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(packing.cpu, "load", lambda: False)
    assert packing.pack(torch.zeros(1024, 1024)) is None
    layer = ReplicatedLinear(IN, OUT)
    layer.weight.data.fill_(1.0)
    layer.bias.data.zero_()
    layer.pack_weights()
    torch.testing.assert_close(layer(torch.ones(2, IN)), torch.full((2, OUT), float(IN)))
