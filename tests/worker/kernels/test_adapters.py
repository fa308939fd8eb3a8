"""Adapters on a linear layer's output: C++ against the specification, and bits that depend on a token alone."""

import pytest
import torch

from quire.testing.linear_contracts import ROUNDING
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
from quire.worker.kernels.cpu.build import HERE

pytestmark = pytest.mark.skipif(not cpu.load(), reason="there are no kernels in C++ here")

NUM_SLOTS = 5
# greatest rank of the slots, and ranks in them: within a step of the matrix unit, and beyond one
RANKS = [(16, [16, 1, 8, 13, 0]), (70, [70, 3, 33, 64, 0])]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (inputs, outputs of each part)
SHAPES = [(64, [96]), (75, [33, 7, 5]), (128, [640, 128, 128]), (17, [3]), (256, [1100, 1100])]
# Of the others, the products of weights alone are different.
ISAS = [isa for isa in HERE.isas if HERE.only.get(isa) != ("matmul.cpp",)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(num_inputs, parts, dtype, num_tokens, seed=0, most_rank=16, ranks=(16, 1, 8, 13, 0)):
    """(y, x, slots, ranks, a, b, parts, most_rank); behind an adapter in its slot is NaN, because nobody may use it."""
    form = kernels.AdapterFormat(num_inputs, tuple(parts), dtype)
    a, b = (torch.full((NUM_SLOTS, size), float("nan"), dtype=dtype) for size in form.sizes(most_rank))
    for slot, rank in enumerate(ranks):
        if rank == 0:
            continue
        of_a = [random(rank, num_inputs, seed=10 * slot + p) / num_inputs**0.5 for p in range(len(parts))]
        of_b = [random(part, rank, seed=100 + 10 * slot + p) / rank**0.5 for p, part in enumerate(parts)]
        packed_a, packed_b = form.pack([piece.to(dtype) for piece in of_a], [piece.to(dtype) for piece in of_b])
        a[slot, : len(packed_a)] = packed_a
        b[slot, : len(packed_b)] = packed_b
    slots = torch.randint(-1, NUM_SLOTS, (num_tokens,), generator=torch.Generator().manual_seed(seed)).int()
    y = random(num_tokens, sum(parts), seed=3).to(dtype)
    x = random(num_tokens, num_inputs, seed=4).to(dtype)
    return y, x, slots, torch.tensor(ranks, dtype=torch.int32), a, b, parts, most_rank


@pytest.fixture(params=ISAS)
def isa(request):
    before = cpu.statistics()["isa"]
    if not cpu.select_isa(request.param):
        pytest.skip(f"no {request.param} here")
    yield
    cpu.select_isa(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "parts"), SHAPES)
@pytest.mark.parametrize(("most_rank", "ranks"), RANKS)
def test_add_adapters(isa, num_inputs, parts, dtype, most_rank, ranks):
    for num_tokens in (0, 1, 2, 9, 170):
        y, *others = case(num_inputs, parts, dtype, num_tokens, most_rank=most_rank, ranks=ranks)
        expected = y.clone()
        reference.add_adapters(expected, *others)
        found = y.clone()
        kernels.add_adapters(found, *others)
        bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 4)
        slots = others[1]
        assert torch.equal(found[slots < 0], y[slots < 0]), "a base row has changed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "parts"), SHAPES)
def test_a_sum_that_is_not_finished_stays_in_float32(isa, num_inputs, parts, dtype):
    y, *others = case(num_inputs, parts, dtype, 9)
    expected = y.to(torch.float32, copy=True)
    reference.add_adapters(expected, *others)
    found = y.to(torch.float32, copy=True)
    kernels.add_adapters(found, *others)
    bound = 1e-5 if dtype == torch.float32 else 2 * ROUNDING[dtype]
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * 4)
    rounded = y.clone()
    kernels.add_adapters(rounded, *others)
    assert torch.equal(found.to(dtype), rounded), "it is the same sum"


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "parts"), SHAPES)
@pytest.mark.parametrize("rank", [1, 2, 16, 33])
def test_a_slot_holds_what_was_packed(dtype, num_inputs, parts, rank):
    form = kernels.AdapterFormat(num_inputs, tuple(parts), dtype)
    a = [random(rank, num_inputs, seed=p).to(dtype) for p in range(len(parts))]
    b = [random(part, rank, seed=p).to(dtype) for p, part in enumerate(parts)]
    packed = form.pack(a, b)
    assert tuple(map(len, packed)) == form.sizes(rank)
    again_a, again_b = form.unpack(*(torch.cat([piece, piece.new_full((9,), float("nan"))]) for piece in packed), rank)
    assert all(map(torch.equal, [*a, *b], [*again_a, *again_b]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slots": torch.full((12,), NUM_SLOTS, dtype=torch.int32)}, "slot 5: there are 5"),
        ({"slots": torch.zeros(12, dtype=torch.int64)}, "int32"),
        ({"slots": torch.zeros(11, dtype=torch.int32)}, "an entry for each row"),
        ({"ranks": torch.full((NUM_SLOTS,), 17, dtype=torch.int32)}, "rank 17: at most 16"),
        ({"x": torch.zeros(12, 65)}, "1280 elements in a"),
        ({"y": torch.zeros(12, 97), "parts": [97]}, "1792 in b"),
        ({"x": torch.zeros(12, 64, dtype=torch.float16)}, "one dtype"),
        ({"parts": [95]}, "95 outputs together"),
        ({"parts": [48, 48]}, "2048 elements in a"),
        ({"most_rank": 15}, "slots of rank 15"),
        ({"a": torch.zeros(4, 1024)}, "must be .slots, elements."),
    ],
)
def test_wrong_arguments_are_named(change, words):
    names = ("y", "x", "slots", "ranks", "a", "b", "parts", "most_rank")
    arguments = dict(zip(names, case(64, [96], torch.float32, 12), strict=True)) | change
    with pytest.raises(RuntimeError, match=words):
        kernels.add_adapters(*arguments.values())
