"""Sums over ranks: slices of a product make up the whole bit for bit, and ranks in processes meet in shared memory."""

import os
import subprocess
import sys

import pytest
import torch

from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.testing.linear_contracts import DTYPES, QuantizedCase, inputs
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
from quire.worker.kernels.reference.sums import tree_sum

ROWS, INPUTS = 70, 1024
KINDS = {
    **{str(dtype): dtype for dtype in DTYPES},
    "int8": QuantizedCase(8, (ROWS, INPUTS)),
    "int8 groups": QuantizedCase(8, (ROWS, INPUTS), 32, "each"),
    "int4": QuantizedCase(4, (ROWS, INPUTS), 16, "each", False),
    "int4 weight-only": QuantizedCase(4, (ROWS, INPUTS), 32, "fractions", False, is_weight_only=True),
    "int6": QuantizedCase(6, (ROWS, INPUTS), 64, "each"),
    "fp4": QuantizedCase(4, (ROWS, INPUTS), 32),
}


def packed_pieces(kind, twin, num_pieces):
    """The weight in as many pieces of its inputs as there are ranks, each packed by itself."""
    if isinstance(kind, torch.dtype):
        whole = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(2)).to(kind)
        return [twin.pack_weight(piece) for piece in whole.chunk(num_pieces, dim=1)]
    values, scales, offsets = kind.make()
    parts = [
        values.chunk(num_pieces, dim=1),
        [scales] * num_pieces if kind.num_groups == 1 else scales.chunk(num_pieces, dim=1),
        [offsets] * num_pieces if offsets is None or kind.num_groups == 1 else offsets.chunk(num_pieces, dim=1),
    ]
    return [
        twin.pack_quantized(
            piece.contiguous(),
            of_scales.contiguous(),
            None if of_offsets is None else of_offsets.contiguous(),
            bits=kind.bits,
            weight_only=kind.is_weight_only,
        )
        for piece, of_scales, of_offsets in zip(*parts, strict=True)
    ]


def partial_sums(twin, kind, x, size):
    """What each of `size` ranks brings: eight slices between them."""
    pieces = zip(packed_pieces(kind, twin, size), x.chunk(size, dim=1), strict=True)
    return [
        twin.sliced_linear(of_x, packed, None, ROWS, num_slices=8 // size, dtype=torch.float32)
        for packed, of_x in pieces
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_the_sum_has_the_same_bits_whatever_the_number_of_ranks(product_kernels, kind, dtype):
    for num_rows in (1, 5, 33, 200):
        x = inputs(num_rows, INPUTS, dtype)
        (whole,) = partial_sums(product_kernels, kind, x, 1)
        for size in (2, 4, 8):
            assert torch.equal(tree_sum(partial_sums(product_kernels, kind, x, size)), whole), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_sliced_product_is_that_of_the_reference(product_kernels, kind, dtype):
    x = inputs(13, INPUTS, dtype)
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(3)).to(dtype)
    (packed,) = packed_pieces(kind, product_kernels, 1)
    (plain,) = packed_pieces(kind, reference, 1)
    ours = product_kernels.sliced_linear(x, packed, bias, ROWS, num_slices=8, dtype=dtype)
    expected = reference.sliced_linear(x, plain, bias, ROWS, 8, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=2e-2)


def test_a_row_has_the_same_bits_alone_and_among_others(product_kernels):
    x = inputs(150, INPUTS, torch.bfloat16)
    (packed,) = packed_pieces(torch.bfloat16, product_kernels, 1)
    together = product_kernels.sliced_linear(x, packed, None, ROWS, num_slices=8, dtype=torch.bfloat16)
    for row in (0, 77, 149):
        alone = product_kernels.sliced_linear(x[row : row + 1], packed, None, ROWS, num_slices=8, dtype=torch.bfloat16)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("num_slices", [3, 128])
def test_slices_that_do_not_fit_are_refused(product_kernels, num_slices):
    packed = product_kernels.pack_weight(torch.zeros(4, INPUTS))
    with pytest.raises(RuntimeError, match="slices"):
        product_kernels.sliced_linear(
            torch.zeros(1, INPUTS), packed, None, 4, num_slices=num_slices, dtype=torch.float32
        )


def run_ranks(program, size, home):
    """The program in a process for each rank, each of which says that it is done."""
    # places of a few thousand numbers
    num_bytes = 8192 + 2 * size * 12_288
    meeting = SharedMeeting(num_bytes)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(size), str(meeting.descriptor), str(num_bytes), home],
            pass_fds=(meeting.descriptor,),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        assert [child.communicate(timeout=120)[0] for child in children] == ["done\n"] * size
    finally:
        for child in children:
            child.kill()
        meeting.close_descriptor()


SUMS = """
import sys
import torch
from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.worker import kernels
from quire.worker.kernels import reference

rank, size, descriptor, num_bytes, home = *map(int, sys.argv[1:5]), sys.argv[5]
memory = torch.frombuffer(SharedMeeting(num_bytes, descriptor).memory, dtype=torch.uint8)
all_reduce = reference.all_reduce if home == "reference" else kernels.all_reduce
def brought(rank, turn):
    # some are longer than a place, and go in pieces
    return torch.randn(1 + turn % 3, 700 * (1 + turn % 7), generator=torch.Generator().manual_seed(100 * turn + rank))
for turn in range(60):
    dtype = (torch.float32, torch.bfloat16)[turn % 2]
    parts = [brought(other, turn) for other in range(size)]
    bias = brought(99, turn)[0].to(dtype) if turn % 5 == 0 else None
    sums = all_reduce(parts[rank], bias, memory, rank, size, dtype)
    total = reference.sums.tree_sum(parts)
    assert torch.equal(sums, (total if bias is None else total + bias.float()).to(dtype)), turn
print("done")
"""


HOMES = [pytest.param(2, "kernels", marks=pytest.mark.nightly), (3, "kernels"), (2, "reference")]


GATHERED = """
import sys
import torch
from quire.engine_core.executor.shared_memory import SharedMeeting
from quire.worker import kernels
from quire.worker.kernels import reference

rank, size, descriptor, num_bytes, home = *map(int, sys.argv[1:5]), sys.argv[5]
memory = torch.frombuffer(SharedMeeting(num_bytes, descriptor).memory, dtype=torch.uint8)
all_gather = reference.all_gather if home == "reference" else kernels.all_gather
# odd numbers of columns, none for some ranks, rows that a place has no room for
for turn, total in enumerate([7, 1, 300, 3001, 40_001, 9000] * 4):
    dtype = (torch.float32, torch.bfloat16)[turn % 2]
    whole = torch.randn(1 + turn % 5, total, generator=torch.Generator().manual_seed(turn)).to(dtype)
    own = whole[:, total * rank // size : total * (rank + 1) // size].contiguous()
    assert torch.equal(all_gather(own, memory, rank, size, total), whole), (turn, total)
print("done")
"""


@pytest.mark.parametrize(("size", "home"), HOMES)
def test_ranks_in_processes_have_the_sum_of_all(size, home):
    run_ranks(SUMS, size, home)


@pytest.mark.parametrize(("size", "home"), HOMES)
def test_ranks_in_processes_have_what_all_bring(size, home):
    run_ranks(GATHERED, size, home)


def test_a_rank_that_brings_other_columns_is_refused():
    memory = torch.zeros(kernels.meeting_bytes(2), dtype=torch.uint8)
    if not cpu.load():
        pytest.skip("no kernels in C++ here")
    with pytest.raises(RuntimeError, match="rank 0 of 2 brings 5 columns of 9"):
        kernels.all_gather(torch.zeros(1, 5), memory, 0, 2, 9)


def test_nobody_waits_any_more_once_it_is_aborted(product_kernels):
    meeting = SharedMeeting(kernels.meeting_bytes(2))
    meeting.abort()
    memory = torch.frombuffer(meeting.memory, dtype=torch.uint8)
    product_kernels.all_reduce(torch.ones(4), None, memory, 0, 2, torch.float32)
    assert meeting.is_aborted
    meeting.close_descriptor()
