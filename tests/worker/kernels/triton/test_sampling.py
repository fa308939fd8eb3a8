"""The operations on logits in Triton: the contracts of `sampling_contracts.py`."""

import numpy as np
import pytest
import torch

from quire.testing import sampling_contracts as contracts
from quire.testing.attention_cases import DTYPES
from quire.testing.sampling_contracts import LIMITS, NO_LIMIT, VOCAB_SIZES, Limits, logits_of
from quire.worker.kernels import reference


@pytest.mark.parametrize("vocab_size", [1, 50, 5001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_best_tokens(triton_kernels, dtype, vocab_size):
    contracts.check_best_tokens(triton_kernels, dtype, vocab_size)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_draws_follow_the_definition(triton_kernels, limits):
    contracts.check_choose_tokens(triton_kernels, torch.bfloat16, 700, limits)


@pytest.mark.nightly
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_draws(triton_kernels, vocab_size, limits, dtype):
    contracts.check_choose_tokens(triton_kernels, dtype, vocab_size, limits)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_draw_for_themselves(triton_kernels, dtype):
    contracts.check_mixed_rows(triton_kernels, dtype)


def test_the_reference_draws_the_same(triton_kernels):
    """Up to rounding, which decides one draw in some hundred thousands."""
    count = 20
    random = np.random.default_rng(2)
    columns = {
        "temperature_n": random.choice([0.0, 0.7, 3.0], count).astype(np.float32),
        "top_k_n": random.choice([40, NO_LIMIT], count),
        "top_p_n": random.choice([0.3, 0.99, 1.0], count),
        "min_p_n": random.choice([0.0, 0.02], count).astype(np.float32),
        "uniform_n": random.random(count),
    }
    settings = {name: torch.from_numpy(column) for name, column in columns.items()}
    logits = logits_of(count, 700, torch.bfloat16, seed=5)
    mine, top = triton_kernels.choose_tokens(logits, None, **settings)
    theirs, their_top = reference.choose_tokens(logits, None, **settings)
    assert torch.equal(top, their_top)
    assert (mine != theirs).sum() <= 1


@pytest.mark.parametrize("spread", [0.0, 30.0])
@pytest.mark.parametrize("top_p", [0.2, 0.99999])
def test_a_nucleus_of_any_size(triton_kernels, spread, top_p):
    """All logits equal, and far apart."""
    limits = Limits(top_p=top_p)
    logits = logits_of(1, 3000, torch.bfloat16, spread=spread)[:, 700:].expand(5, -1)
    uniform = (np.arange(5) + 0.5) / 5
    tokens, _ = triton_kernels.choose_tokens(logits, None, **limits.settings(uniform))
    for token, number in zip(tokens.tolist(), uniform.tolist(), strict=True):
        start, end, mass = contracts.interval_of(token, logits[0].double().numpy(), limits)
        assert start - 1e-5 * mass <= number * mass <= end + 1e-5 * mass


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("limits", [Limits(), Limits(top_k=5), Limits(top_p=0.5)], ids=str)
def test_rows_that_are_not_finite_get_something(triton_kernels, broken, limits):
    logits = logits_of(3, 500, torch.float32)
    settings = limits.settings(np.array([0.1, 0.5, 0.9]))
    expected, _ = triton_kernels.choose_tokens(logits, None, **settings)
    logits[1] = broken if broken == -torch.inf else logits[1]
    logits[1, 77] = broken
    found, _ = triton_kernels.choose_tokens(logits, None, **settings)
    assert torch.equal(found[::2], expected[::2])
    assert 0 <= int(found[1]) < 500


@pytest.mark.parametrize(("vocab_size", "most"), [(50, 0), (50, 100), (2500, 5)])
def test_token_logprobs(triton_kernels, vocab_size, most):
    contracts.check_token_logprobs(triton_kernels, torch.bfloat16, vocab_size, most)


@pytest.mark.nightly
@pytest.mark.parametrize("most", [1, 700])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_token_logprobs(triton_kernels, vocab_size, most, dtype):
    contracts.check_token_logprobs(triton_kernels, dtype, vocab_size, most)


def test_gather_logits(triton_kernels):
    contracts.check_gather_logits(triton_kernels, torch.bfloat16)


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 2500])
def test_apply_bitmask(triton_kernels, vocab_size):
    contracts.check_apply_bitmask(triton_kernels, vocab_size)


def test_penalise(triton_kernels):
    contracts.check_penalise(triton_kernels)
