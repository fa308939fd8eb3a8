"""Norms of what ranks share."""

import pytest
import torch

from quire.worker.layers import ProjectionNorm, RMSNorm, TensorParallelGroup, load_weight, tensor_parallel

WIDTH, EPS = 24, 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "num_shares"), [(1, 1), (2, 2), (4, 4), (4, 2), (8, 2)])
def test_ranks_divide_by_the_root_of_all_to_the_last_bit(size, num_shares, dtype):
    """With fewer shares than ranks some have the same one, as they have of heads of keys."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(shape, generator=generator).to(dtype) for shape in ((WIDTH,), (5, WIDTH)))
    whole = RMSNorm(WIDTH, EPS).to(dtype)
    load_weight(whole.weight, weight)
    shares = x.chunk(num_shares, dim=1)
    brought = [shares[rank * num_shares // size] for rank in range(size)]
    given = [x.new_zeros(0)] * size

    def gather(own, total):
        assert torch.equal(own, given[0])
        assert total == sum(part.shape[1] for part in brought)
        return torch.cat(brought, dim=1)

    for rank in range(size):
        with tensor_parallel(TensorParallelGroup(rank, size, all_gather=gather)):
            norm = ProjectionNorm(WIDTH, EPS).to(dtype)
        load_weight(norm.weight, weight)
        given[0] = brought[rank]
        expected = whole(x).chunk(num_shares, dim=1)[rank * num_shares // size]
        assert torch.equal(norm(brought[rank]), expected)
