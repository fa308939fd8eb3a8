"""Recurrences in Triton: as the reference says, and the same bits however a sequence is cut into steps."""

import pytest
import torch
from tests.worker.kernels.test_recurrent import KINDS, Pool, piece, step

from quire.testing.kernel_contracts import assert_close
from quire.worker.kernels import reference

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_the_reference(triton_kernels, kind, dtype):
    inputs = [tensor.to(dtype) for tensor in KINDS[kind][1](14)]
    pieces = [piece(inputs, 0, 1), piece(inputs, 1, 10), piece(inputs, 10, 14)]
    results = []
    for home in (reference, triton_kernels):
        pool = Pool(kind, 3)
        outs = step(kind, home, pool, pieces, [1, 9, 2], [0, 0, 0])
        results.append((torch.cat(outs), pool.values()))
    assert_close(*(out for out, _ in results))
    torch.testing.assert_close(*(states for _, states in results), atol=1e-5, rtol=1e-4)


def test_inputs_may_be_views(triton_kernels, kind):
    inputs = KINDS[kind][1](3)
    wide = [torch.cat([tensor, torch.full_like(tensor, torch.nan)], dim=-1) for tensor in inputs]
    views = [tensor[..., : plain.shape[-1]] for tensor, plain in zip(wide, inputs, strict=True)]
    [expected] = step(kind, triton_kernels, Pool(kind, 1), [inputs], [3], [0])
    out = torch.empty_like(expected)
    KINDS[kind][0](triton_kernels, views, [Pool(kind, 1).of_step([3], [3], [0])], out)
    assert torch.equal(out, expected)


def test_cuts_drafts_and_tokens_that_are_read_again(triton_kernels, kind):
    inputs = KINDS[kind][1](9)
    whole = Pool(kind, 1)
    [expected] = step(kind, triton_kernels, whole, [inputs], [9], [0])
    pool = Pool(kind, 2)
    other = piece(inputs, 2, 4)
    # five tokens, of which two are drafts
    _, first = step(kind, triton_kernels, pool, [other, piece(inputs, 0, 5)], [2, 3], [0, 0])
    # the last token once more, then the rest
    [_, again] = step(kind, triton_kernels, pool, [other, piece(inputs, 2, 3)], [2, 1], [0, 1])
    [_, rest] = step(kind, triton_kernels, pool, [other, piece(inputs, 3, 9)], [2, 6], [0, 0])
    assert torch.equal(first, expected[:5])
    assert torch.equal(again, expected[2:3])
    assert torch.equal(rest, expected[3:])
    assert torch.equal(pool.values()[1], whole.values()[0])
