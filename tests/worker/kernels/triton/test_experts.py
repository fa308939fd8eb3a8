"""A layer of experts in Triton against the reference."""

import pytest
import torch

from quire.errors import OptionError
from quire.testing.linear_contracts import ROUNDING
from quire.worker.kernels import cpu, reference
from quire.worker.kernels import triton as home
from quire.worker.layers.experts import Experts, Routing
from quire.worker.layers.packing import pack
from quire.worker.layers.quantization import find_scheme
from quire.worker.weight_loading import pack_weights

NUM_EXPERTS, TOP_K, WIDTH, NUM_ROWS = 12, 3, 128, 70
ROUTINGS = {
    "softmax": {},
    "not normalised": {"is_normalised": False},
    "scaled": {"scale": 2.5},
    "sigmoid": {"is_sigmoid": True},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups of sigmoids": {"is_sigmoid": True, "num_groups": 3, "top_groups": 1, "scale": 1.5},
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_route_tokens(triton_kernels, name, has_bias):
    logits = random(40, NUM_EXPERTS + 5).bfloat16()[:, :NUM_EXPERTS]
    bias = random(NUM_EXPERTS, seed=1) / 5 if has_bias else None
    options = {"is_sigmoid": False, "is_normalised": True, "num_groups": 1, "top_groups": 1, "scale": 1.0}
    options |= ROUTINGS[name]
    weights, ids = triton_kernels.route_tokens(logits, bias, top_k=TOP_K, **options)
    expected_weights, expected_ids = reference.route_tokens(logits, bias, TOP_K, *options.values())
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_equal_scores_go_to_the_lower_number(triton_kernels):
    _, ids = triton_kernels.route_tokens(torch.zeros(2, NUM_EXPERTS), None, top_k=TOP_K)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf, torch.inf])
def test_a_token_that_is_not_finite_asks_experts_that_exist(triton_kernels, broken):
    logits = random(3, NUM_EXPERTS)
    expected = triton_kernels.route_tokens(logits, None, top_k=TOP_K)
    logits[1] = broken
    weights, ids = triton_kernels.route_tokens(logits, None, top_k=TOP_K)
    assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    assert torch.equal(weights[::2], expected[0][::2])


def packed_experts(kernels, form, dtype):
    """(for the kernels, for the reference)"""
    ours, theirs = [], []
    for number in range(NUM_EXPERTS):
        weight = (random(NUM_ROWS, WIDTH, seed=number) / 8).to(dtype)
        if form is None:
            ours.append(kernels.pack_weight(weight))
            theirs.append(reference.pack_weight(weight))
            continue
        codes = find_scheme(form).quantize(weight, "linear")
        parts = codes.values, codes.scales, codes.offsets
        ours.append(kernels.pack_quantized(*parts, bits=codes.bits, weight_only=codes.weight_only))
        theirs.append(reference.pack_quantized(*parts, codes.bits, codes.weight_only))
    return ours, theirs


@pytest.mark.parametrize("form", [None, "int8", "int4_weight_only"])
@pytest.mark.parametrize("has_row_per_pair", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 65])
def test_grouped_linear(triton_kernels, form, has_row_per_pair, num_tokens):
    ours, theirs = packed_experts(triton_kernels, form, torch.bfloat16)
    biases = list(random(NUM_EXPERTS, NUM_ROWS, seed=5))
    # most tokens go to few experts, and some experts get none
    logits = random(num_tokens, NUM_EXPERTS, seed=num_tokens) * 3 - torch.arange(NUM_EXPERTS)
    ids = logits.topk(TOP_K).indices.int()
    x = random(num_tokens, *([TOP_K] if has_row_per_pair else []), WIDTH, seed=9).bfloat16()
    counts, expected_counts = torch.ones(2, NUM_EXPERTS, dtype=torch.int64)
    found = triton_kernels.grouped_linear(x, ids, ours, biases, NUM_ROWS, counts)
    expected = reference.grouped_linear(x, ids, theirs, biases, NUM_ROWS, expected_counts)
    assert counts.tolist() == expected_counts.tolist()
    bound = 2 * ROUNDING[torch.bfloat16]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_more_tiles_than_an_axis_of_a_grid_has(triton_kernels, monkeypatch):
    """The last of the axes is rarely filled up."""
    from quire.worker.kernels.triton import grouped_linear

    ours, _ = packed_experts(triton_kernels, None, torch.bfloat16)
    ids = random(70, NUM_EXPERTS).topk(TOP_K).indices.int()
    x = random(70, NUM_EXPERTS, WIDTH, seed=9).bfloat16()
    for given in ((x[:, :TOP_K], ids), (x, None)):
        expected = triton_kernels.grouped_linear(*given, ours, [], NUM_ROWS)
        with monkeypatch.context() as patch:
            patch.setattr(grouped_linear, "_LONGEST_AXIS", 7)
            found = triton_kernels.grouped_linear(*given, ours, [], NUM_ROWS)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_experts_that_are_elsewhere_add_zeros(triton_kernels, num_tokens):
    """Of two parts each computes its pairs: together they are the whole, bit for bit."""
    ours, _ = packed_experts(triton_kernels, None, torch.float32)
    biases = list(random(NUM_EXPERTS, NUM_ROWS, seed=5))
    ids = random(num_tokens, NUM_EXPERTS, seed=num_tokens).topk(TOP_K).indices.int()
    x = random(num_tokens, WIDTH, seed=9)
    whole = triton_kernels.grouped_linear(x, ids, ours, biases, NUM_ROWS)
    is_first = (ids < 5)[..., None]
    for mine, is_mine in ((range(5), is_first), (range(5, NUM_EXPERTS), ~is_first)):
        own = slice(mine.start, mine.stop)
        counts = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        found = triton_kernels.grouped_linear(x, ids, ours[own], biases[own], NUM_ROWS, counts, mine.start)
        torch.testing.assert_close(found, torch.where(is_mine, whole, torch.zeros(())), rtol=1e-5, atol=1e-5)
        assert not found[~is_mine.expand_as(found)].any()
        assert counts.tolist() == ids.flatten().bincount(minlength=NUM_EXPERTS).tolist()


def test_an_expert_that_does_not_exist_reads_no_foreign_memory(triton_kernels):
    ours, _ = packed_experts(triton_kernels, None, torch.float32)
    x = random(2, WIDTH)
    ids = torch.tensor([[-7, 0, 1], [2, 99, 3]], dtype=torch.int32)
    found = triton_kernels.grouped_linear(x, ids, ours, [], NUM_ROWS)
    there = triton_kernels.grouped_linear(x, ids.clamp(0, 11), ours, [], NUM_ROWS)
    there[0, 0] = there[1, 1] = 0.0
    torch.testing.assert_close(found, there, rtol=1e-6, atol=1e-6)


def test_a_weight_for_each_row_of_a_token(triton_kernels):
    """Rows are a slice of wider ones, as the heads of a query are."""
    ours, theirs = packed_experts(triton_kernels, None, torch.bfloat16)
    x = random(20, NUM_EXPERTS, WIDTH + 32, seed=3).bfloat16()[..., :WIDTH]
    found = triton_kernels.grouped_linear(x, None, ours, [], NUM_ROWS)
    expected = reference.grouped_linear(x, None, theirs, [], NUM_ROWS, None)
    bound = 2 * ROUNDING[torch.bfloat16]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_weights_that_took_the_place_of_others(triton_kernels):
    """The table of addresses belongs to these tensors alone."""
    ours, _ = packed_experts(triton_kernels, None, torch.float32)
    x = random(4, WIDTH)
    ids = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)
    before = triton_kernels.grouped_linear(x, ids, ours, [], NUM_ROWS)
    others = [ours[0], triton_kernels.pack_weight(torch.zeros(NUM_ROWS, WIDTH)), *ours[2:]]
    found = triton_kernels.grouped_linear(x, ids, others, [], NUM_ROWS)
    assert not found[:, 1].any()
    assert torch.equal(found[:, 2], before[:, 2])
    different = [ours[0], triton_kernels.pack_weight(torch.zeros(NUM_ROWS, 2 * WIDTH))]
    with pytest.raises(RuntimeError, match="packed alike"):
        triton_kernels.grouped_linear(x, ids, different, [], NUM_ROWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weigh_experts(triton_kernels, dtype):
    x = random(6, TOP_K, 1077).to(dtype)
    weights = random(6, TOP_K).abs()
    found = triton_kernels.weigh_experts(x, weights)
    torch.testing.assert_close(found, reference.weigh_experts(x, weights), rtol=2 * ROUNDING[dtype], atol=1e-6)


@pytest.fixture
def as_on_a_gpu(triton_kernels, monkeypatch):
    """Where there is Triton and no C++."""
    monkeypatch.setattr(cpu, "load", lambda: False)
    monkeypatch.setattr(home, "serves", lambda device: True)


def test_a_layer_of_experts_is_packed_and_says_the_same(as_on_a_gpu):
    layer = Experts(32, 16, 6, Routing(top_k=2), "silu", bias=True)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=number) / 4)
    x = random(5, 32, seed=99)
    expected = layer(x)
    pack_weights(layer)
    assert layer.experts["0"].down_proj.packed is not None
    assert layer.gate.packed is None, "what meets a batch by itself is torch's business"
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer.num_tokens_X.sum() == 2 * 5 * 2


def test_other_floats_are_packed_for_a_fixed_order(as_on_a_gpu, monkeypatch):
    weight = random(8, 16)
    assert pack(weight) is None
    monkeypatch.setenv("QUIRE_GPU_PRODUCTS", "fixed")
    assert torch.equal(home.twin("unpack_weight")(pack(weight)), weight)
    monkeypatch.setenv("QUIRE_GPU_PRODUCTS", "any")
    with pytest.raises(OptionError, match="must be auto or fixed"):
        pack(weight)
