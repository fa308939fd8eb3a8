"""Numbers depend on seed and position alone, and look uniform."""

import numpy as np

from quire.worker.sampler.choose import hashed, to_uint64, uniforms_of


def numbers(seeds, positions):
    seeds = np.array([to_uint64(seed) for seed in seeds], dtype=np.uint64)
    return uniforms_of(hashed(seeds), np.array(positions))


def test_the_same_in_any_batch_and_order():
    alone = [numbers([seed], [position])[0] for seed, position in [(1, 5), (2, 5), (1, 6)]]

    assert numbers([1, 2, 1], [5, 5, 6]).tolist() == alone
    assert len(set(alone)) == 3


def test_seeds_of_any_sign_and_size():
    values = numbers([-(2**63), -1, 0, 2**62, 2**64 - 1], [0] * 5)

    assert ((values >= 0) & (values < 1)).all()
    assert values[1] == values[4], "modulo 2**64"
    assert len(set(values)) == 4


def test_golden_numbers():
    # Frozen: a seed that a user wrote down must give the same text in later versions.
    assert numbers([0, 1, 42], [0, 0, 7]).tolist() == [0.40388814240778714, 0.6153249125733069, 0.990563744638564]


def test_uniform_over_positions_and_over_seeds():
    count = 1 << 15
    for values in (numbers([7] * count, range(count)), numbers(range(count), [7] * count)):
        cells = np.bincount((values * 64).astype(int), minlength=64)
        chi_square = ((cells - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 115, "63 degrees of freedom: 1 in 10,000"
        neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
        assert abs(neighbours) < 4 / np.sqrt(count)
