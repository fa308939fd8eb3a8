"""Adapters on a linear layer's output: C++ against the specification, and bits that depend on a token alone."""

import pytest
import torch

from quire.testing.linear_contracts import ROUNDING
from quire.worker import kernels
from quire.worker.kernels import cpu, reference

pytestmark = pytest.mark.skipif(not cpu.load(), reason="there are no kernels in C++ here")

NUM_SLOTS, MOST_RANK = 5, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (inputs, outputs of each part)
SHAPES = [(64, [96]), (75, [33, 7, 5]), (128, [640, 128, 128]), (17, [3]), (256, [1100, 1100])]
ISAS = ("avx2", "avx512", "amx")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(num_inputs, parts, dtype, num_tokens, seed=0):
    """(y, x, slots, ranks, a, b, parts); ranks differ, and what lies behind them is NaN, because nobody may use it."""
    num_outputs = sum(parts)
    ranks = torch.tensor([16, 1, 8, 13, 0], dtype=torch.int32)
    a = random(NUM_SLOTS, len(parts), MOST_RANK, num_inputs, seed=1) / num_inputs**0.5
    b = random(NUM_SLOTS, MOST_RANK, num_outputs, seed=2)
    for slot, rank in enumerate(ranks.tolist()):
        a[slot, :, rank:] = float("nan")
        b[slot, rank:] = float("nan")
    slots = torch.randint(-1, NUM_SLOTS, (num_tokens,), generator=torch.Generator().manual_seed(seed)).int()
    y = random(num_tokens, num_outputs, seed=3).to(dtype)
    x = random(num_tokens, num_inputs, seed=4).to(dtype)
    return y, x, slots, ranks, a.to(dtype), b.to(dtype), parts


@pytest.fixture(params=ISAS)
def isa(request):
    before = cpu.statistics()["isa"]
    if not cpu.select_isa(request.param):
        pytest.skip(f"no {request.param} here")
    yield
    cpu.select_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "parts"), SHAPES)
def test_add_adapters(isa, num_inputs, parts, dtype):
    for num_tokens in (0, 1, 2, 9, 70):
        y, *others = case(num_inputs, parts, dtype, num_tokens)
        expected = y.clone()
        reference.add_adapters(expected, *others)
        found = y.clone()
        kernels.add_adapters(found, *others)
        bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 4)
        slots = others[1]
        assert torch.equal(found[slots < 0], y[slots < 0]), "a base row has changed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_who_else_is_there(isa, dtype):
    y, x, slots, *others = case(75, [33, 7, 5], dtype, 41)
    together = y.clone()
    kernels.add_adapters(together, x, slots, *others)
    for token in range(len(y)):
        alone = y[token : token + 1].clone()
        kernels.add_adapters(alone, x[token : token + 1], slots[token : token + 1], *others)
        assert torch.equal(alone[0], together[token])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(7))
    mixed = y[order].clone()
    kernels.add_adapters(mixed, x[order], slots[order].contiguous(), *others)
    assert torch.equal(mixed, together[order])


def test_rows_with_gaps():
    """Inputs and outputs may be slices of wider tensors, of which nothing else is touched."""
    y, x, *others = case(64, [96], torch.float32, 12)
    expected = y.clone()
    reference.add_adapters(expected, x, *others)
    wide_y = torch.full((12, 100), 7.0)
    wide_x = torch.full((12, 70), 9.0)
    wide_y[:, :96] = y
    wide_x[:, 3:67] = x
    kernels.add_adapters(wide_y[:, :96], wide_x[:, 3:67], *others)
    torch.testing.assert_close(wide_y[:, :96], expected)
    assert (wide_y[:, 96:] == 7.0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": torch.full((12,), NUM_SLOTS, dtype=torch.int32)}, "slot 5: there are 5"),
        ({"slots": torch.zeros(12, dtype=torch.int64)}, "int32"),
        ({"slots": torch.zeros(11, dtype=torch.int32)}, "an entry for each row"),
        ({"ranks": torch.full((NUM_SLOTS,), 17, dtype=torch.int32)}, "rank 17: at most 16"),
        ({"x": torch.zeros(12, 63)}, "a must be contiguous"),
        ({"y": torch.zeros(12, 95)}, "b must be contiguous"),
        ({"x": torch.zeros(12, 64, dtype=torch.float16)}, "one dtype"),
        ({"parts": [95]}, "95 outputs together"),
        ({"parts": [48, 48]}, "a must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    names = ("y", "x", "slots", "ranks", "a", "b", "parts")
    arguments = dict(zip(names, case(64, [96], torch.float32, 12), strict=True)) | change
    with pytest.raises(RuntimeError, match=words):
        kernels.add_adapters(*arguments.values())
