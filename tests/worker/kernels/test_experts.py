"""The operators of a mixture of experts: C++ against the specification, and bits that do not depend on the batch."""

import pytest
import torch

from quire.testing.linear_contracts import ROUNDING
from quire.worker import kernels
from quire.worker.kernels import cpu, operators, reference
from quire.worker.kernels.reference.packed_format import FP4_VALUES
from quire.worker.layers.quantization import find_scheme
from quire.worker.layers.quantization.quantized_weight import QuantizedWeight

pytestmark = pytest.mark.skipif(not cpu.load(), reason="there are no kernels in C++ here")

NUM_EXPERTS, TOP_K, WIDTH, NUM_ROWS = 12, 3, 128, 70
NUM_TOKENS = (1, 2, 9, 65, 300)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_tokens(name, has_bias, dtype):
    logits = random(200, NUM_EXPERTS).to(dtype)
    bias = random(NUM_EXPERTS, seed=1) / 5 if has_bias else None
    options = {"is_sigmoid": False, "is_normalised": True, "num_groups": 1, "top_groups": 1, "scale": 1.0}
    options |= ROUTINGS[name]
    weights, ids = kernels.route_tokens(logits, bias, top_k=TOP_K, **options)
    expected_weights, expected_ids = reference.route_tokens(logits, bias, TOP_K, *options.values())
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_equal_scores_go_to_the_lower_number():
    _, ids = kernels.route_tokens(torch.zeros(2, NUM_EXPERTS), None, top_k=TOP_K)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]


def fp4(weight):
    """Any weight in 4-bit floats, with a power of two for 32 inputs."""
    values = torch.tensor(FP4_VALUES, dtype=torch.int8)
    codes = values[(weight.float() * 80).round().long() % len(FP4_VALUES)]
    scales = 2.0 ** (random(weight.shape[0], weight.shape[1] // 32).round() - 7)
    return QuantizedWeight(codes, scales, None, bits=4, weight_only=True)


def packed_experts(form, dtype):
    """(for the kernels, for the reference)"""
    ours, theirs = [], []
    for number in range(NUM_EXPERTS):
        weight = (random(NUM_ROWS, WIDTH, seed=number) / 8).to(dtype)
        if form is None:
            ours.append(kernels.pack_weight(weight))
            theirs.append(reference.pack_weight(weight))
            continue
        if form == "fp4":
            codes = fp4(weight)
        else:
            # a head in int4 has 6 bits
            codes = find_scheme(form.removesuffix(" head")).quantize(weight, "head" if "head" in form else "linear")
        assert isinstance(codes, QuantizedWeight)
        parts = codes.values, codes.scales, codes.offsets
        ours.append(kernels.pack_quantized(*parts, bits=codes.bits, weight_only=codes.weight_only))
        theirs.append(reference.pack_quantized(*parts, codes.bits, codes.weight_only))
    return ours, theirs


FORMS = (None, "int8", "int4", "int4 head", "int8_weight_only", "int4_weight_only", "int4_weight_only head", "fp4")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_row_per_pair", [False, True])
def test_grouped_linear(form, dtype, has_row_per_pair):
    ours, theirs = packed_experts(form, dtype)
    biases = list(random(NUM_EXPERTS, NUM_ROWS, seed=5))
    for num_tokens in NUM_TOKENS:
        # most tokens go to few experts, and some experts get none
        logits = random(num_tokens, NUM_EXPERTS, seed=num_tokens) * 3 - torch.arange(NUM_EXPERTS)
        ids = logits.topk(TOP_K).indices.int()
        x = random(num_tokens, *([TOP_K] if has_row_per_pair else []), WIDTH, seed=9).to(dtype)
        counts, expected_counts = torch.ones(NUM_EXPERTS, dtype=torch.int64), torch.ones(NUM_EXPERTS, dtype=torch.int64)
        found = kernels.grouped_linear(x, ids, ours, biases, NUM_ROWS, counts)
        expected = reference.grouped_linear(x, ids, theirs, biases, NUM_ROWS, expected_counts)
        assert counts.tolist() == expected_counts.tolist()
        assert counts.sum() == NUM_EXPERTS + ids.numel()
        bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
        # integers of 4 bits keep their scales in 11 bits
        bound = max(bound, 2e-3) if form is not None else bound
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 8)
        for token in {0, num_tokens // 2, num_tokens - 1}:
            alone = kernels.grouped_linear(x[token : token + 1], ids[token : token + 1], ours, biases, NUM_ROWS)
            assert torch.equal(alone[0], found[token]), "others change the bits of a token"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weigh_experts(dtype):
    x, weights = random(40, TOP_K, 77).to(dtype), random(40, TOP_K).abs()
    found = kernels.weigh_experts(x, weights)
    expected = reference.weigh_experts(x, weights)
    torch.testing.assert_close(found, expected, rtol=2 * ROUNDING[dtype], atol=1e-6)


def test_an_expert_that_does_not_exist_reads_no_foreign_memory():
    """Numbers of experts are made within a program, where nobody can look at them before."""
    ours, _ = packed_experts(None, torch.float32)
    x = random(2, WIDTH)
    found = kernels.grouped_linear(x, torch.tensor([[-7, 0, 1], [2, 99, 3]], dtype=torch.int32), ours, [], NUM_ROWS)
    there = kernels.grouped_linear(x, torch.tensor([[0, 0, 1], [2, 11, 3]], dtype=torch.int32), ours, [], NUM_ROWS)
    there[0, 0] = there[1, 1] = 0.0
    assert torch.equal(found, there)


@pytest.mark.parametrize("form", [None, "int8"])
def test_a_token_may_ask_an_expert_twice(form):
    """Its two rows make one tile; where all experts of a single token have a row each, these share what is prepared."""
    ours, theirs = packed_experts(form, torch.float32)
    x, ids = random(1, WIDTH), torch.tensor([[3, 3, 1]], dtype=torch.int32)
    found = kernels.grouped_linear(x, ids, ours, [], NUM_ROWS)
    torch.testing.assert_close(
        found, reference.grouped_linear(x, ids, theirs, [], NUM_ROWS, None), rtol=2e-3, atol=2e-2
    )
    assert torch.equal(found[0, 0], found[0, 1])


@pytest.mark.parametrize("form", [None, "int8", "fp4"])
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_experts_that_are_elsewhere_add_zeros(form, num_tokens):
    """Of two parts each computes its pairs: together they are the whole, bit for bit."""
    ours, theirs = packed_experts(form, torch.float32)
    biases = list(random(NUM_EXPERTS, NUM_ROWS, seed=5))
    ids = random(num_tokens, NUM_EXPERTS, seed=num_tokens).topk(TOP_K).indices.int()
    x = random(num_tokens, WIDTH, seed=9)
    whole = kernels.grouped_linear(x, ids, ours, biases, NUM_ROWS)
    is_first = (ids < 5)[..., None]
    for mine, is_mine in ((range(5), is_first), (range(5, NUM_EXPERTS), ~is_first)):
        own = slice(mine.start, mine.stop)
        counts, expected_counts = torch.zeros(2, NUM_EXPERTS, dtype=torch.int64)
        found = kernels.grouped_linear(x, ids, ours[own], biases[own], NUM_ROWS, counts, mine.start)
        assert torch.equal(found, torch.where(is_mine, whole, torch.zeros(())))
        expected = reference.grouped_linear(x, ids, theirs[own], biases[own], NUM_ROWS, expected_counts, mine.start)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-2)
        assert counts.tolist() == expected_counts.tolist() == ids.flatten().bincount(minlength=NUM_EXPERTS).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": torch.zeros(2, TOP_K, dtype=torch.int64)}, "int32"),
        ({"x": torch.zeros(3, WIDTH)}, "a row for each token"),
        ({"x": torch.zeros(2, WIDTH - 1)}, "columns"),
        ({"packed": []}, "at least one expert"),
        ({"num_rows": NUM_ROWS + 1}, "rows"),
        ({"counts": torch.zeros(NUM_EXPERTS - 1, dtype=torch.int64)}, "counts"),
        ({"biases": [torch.zeros(NUM_ROWS)]}, "a bias for each expert"),
        ({"biases": [torch.zeros(NUM_ROWS + 1)] * NUM_EXPERTS}, "bias must be"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    ours, _ = packed_experts(None, torch.float32)
    arguments = {"x": torch.zeros(2, WIDTH), "ids": torch.zeros(2, TOP_K, dtype=torch.int32), "packed": ours}
    arguments |= {"biases": [], "num_rows": NUM_ROWS, "counts": None, "first": 0} | change
    with pytest.raises(RuntimeError, match=words):
        operators.grouped_linear(*arguments.values())


def test_experts_that_are_packed_differently_are_refused():
    ours, _ = packed_experts(None, torch.float32)
    others, _ = packed_experts("int8", torch.float32)
    with pytest.raises(RuntimeError, match="packed alike"):
        kernels.grouped_linear(
            torch.zeros(1, WIDTH), torch.zeros(1, 1, dtype=torch.int32), [ours[0], others[1]], [], NUM_ROWS
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_for_each_row_of_a_token(dtype):
    """Rows are a slice of wider ones, as the heads of a query are."""
    ours, theirs = packed_experts(None, dtype)
    x = random(70, NUM_EXPERTS, WIDTH + 32, seed=3).to(dtype)[..., :WIDTH]
    found = kernels.grouped_linear(x, None, ours, [], NUM_ROWS)
    expected = reference.grouped_linear(x, None, theirs, [], NUM_ROWS, None)
    bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))
    for t in (0, 13, 69):
        assert torch.equal(kernels.grouped_linear(x[t : t + 1], None, ours, [], NUM_ROWS)[0], found[t])
    with pytest.raises(RuntimeError, match="evenly spaced"):
        kernels.grouped_linear(x[:, :, :WIDTH].transpose(0, 1)[:NUM_EXPERTS, :NUM_EXPERTS], None, ours, [], NUM_ROWS)
