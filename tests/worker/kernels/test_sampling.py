"""The operations on logits: the reference and its C++ twin against the definitions."""

import subprocess

import numpy as np
import pytest
import torch

from quire.testing import sampling_contracts as contracts
from quire.testing.attention_cases import DTYPES
from quire.testing.sampling_contracts import LIMITS, NO_LIMIT, VOCAB_SIZES, Limits, logits_of
from quire.worker import kernels
from quire.worker.kernels import cpu, reference
from quire.worker.kernels.cpu import build


@pytest.fixture
def crew_of():
    """Sets the number of threads; the old one comes back."""
    yield cpu.set_crew
    cpu.set_crew(torch.get_num_threads())


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_best_tokens(cpu_kernels, dtype, vocab_size):
    contracts.check_best_tokens(cpu_kernels, dtype, vocab_size)
    contracts.check_best_tokens(reference, dtype, vocab_size)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_follow_the_definition(cpu_kernels, vocab_size, limits):
    for dtype in DTYPES:
        contracts.check_choose_tokens(cpu_kernels, dtype, vocab_size, limits)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_draws_of_the_reference_follow_the_definition(limits):
    for vocab_size in (50, 5001):
        contracts.check_choose_tokens(reference, torch.bfloat16, vocab_size, limits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_draw_for_themselves(cpu_kernels, dtype):
    contracts.check_mixed_rows(cpu_kernels, dtype)
    contracts.check_mixed_rows(reference, dtype)


@pytest.mark.parametrize("most", [0, 1, 5, 100, 700])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_token_logprobs(cpu_kernels, vocab_size, most):
    for dtype in DTYPES:
        contracts.check_token_logprobs(cpu_kernels, dtype, vocab_size, most)
    contracts.check_token_logprobs(reference, torch.bfloat16, vocab_size, most)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_logits(cpu_kernels, dtype):
    contracts.check_gather_logits(cpu_kernels, dtype)
    contracts.check_gather_logits(reference, dtype)


@pytest.mark.parametrize("vocab_size", [1, 31, 64, 5001])
def test_apply_bitmask(cpu_kernels, vocab_size):
    contracts.check_apply_bitmask(cpu_kernels, vocab_size)
    contracts.check_apply_bitmask(reference, vocab_size)


def test_penalise(cpu_kernels):
    contracts.check_penalise(cpu_kernels)
    contracts.check_penalise(reference)


def draws(count, seed=2):
    """A mix of everything, as columns."""
    random = np.random.default_rng(seed)
    columns = {
        "temperature_n": random.choice([0.7, 1.0, 3.0], count).astype(np.float32),
        "top_k_n": random.choice([40, 3000, NO_LIMIT, NO_LIMIT], count),
        "top_p_n": random.choice([0.3, 0.97, 1.0], count),
        "min_p_n": random.choice([0.0, 0.01], count).astype(np.float32),
        "uniform_n": random.random(count),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def everything_of(logits, settings):
    tokens, top = kernels.choose_tokens(logits, None, **settings)
    return tokens, top, *kernels.token_logprobs(logits, None, tokens, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_depends_on_threads_nor_on_the_instruction_set(cpu_kernels, crew_of, dtype):
    """Bit for bit: rows over threads, and rows that threads share because there are too few of them."""
    logits, settings = logits_of(40, 70_001, dtype), draws(40)
    results = []
    for num_threads in (1, 2, 5):
        crew_of(num_threads)
        results.append(everything_of(logits, settings))
        alone = [
            everything_of(logits[i : i + 1], {name: column[i : i + 1] for name, column in settings.items()})
            for i in range(40)
        ]
        results.append(tuple(torch.cat(columns) for columns in zip(*alone, strict=True)))
    cpu.select_isa(next(iter(build.HERE.isas)))
    results.append(everything_of(logits, settings))
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_the_reference_draws_the_same(cpu_kernels):
    """Up to rounding, which decides one draw in some hundred thousands."""
    logits, settings = logits_of(300, 3000, torch.bfloat16), draws(300)
    mine, top = cpu_kernels.choose_tokens(logits, None, **settings)
    theirs, their_top = reference.choose_tokens(logits, None, **settings)
    assert torch.equal(top, their_top)
    assert (mine != theirs).sum() <= 1


@pytest.mark.parametrize("spread", [0.0, 0.05, 30.0])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.99999])
def test_a_nucleus_of_any_size(cpu_kernels, spread, top_p):
    """All logits equal, nearly equal, and far apart."""
    limits = Limits(top_p=top_p)
    logits = logits_of(1, 30_000, torch.bfloat16, spread=spread)[:, 7000:].expand(50, -1)
    uniform = (np.arange(50) + 0.5) / 50
    tokens, _ = cpu_kernels.choose_tokens(logits, None, **limits.settings(uniform))
    for token, number in zip(tokens.tolist(), uniform.tolist(), strict=True):
        start, end, mass = contracts.interval_of(token, logits[0].double().numpy(), limits)
        assert start - 1e-5 * mass <= number * mass <= end + 1e-5 * mass


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_get_something(cpu_kernels, broken):
    logits, settings = logits_of(6, 5000, torch.float32), draws(6)
    expected = everything_of(logits, settings)
    logits = torch.cat([logits, logits])
    logits[6:, 77] = broken
    logits[9] = -torch.inf
    found = everything_of(logits, {name: column.repeat(2) for name, column in settings.items()})
    assert all(torch.equal(mine[:6], theirs) for mine, theirs in zip(found, expected, strict=True))
    assert not found[1][6:].isfinite().any()
    assert ((found[0] >= 0) & (found[0] < 5000)).all()


def test_the_suite_can_fail():
    """A draw that is off by one token must not pass, nor one that forgets the order of equals."""

    class NextToken:
        @staticmethod
        def choose_tokens(logits, rows, **settings):
            tokens, top = reference.choose_tokens(logits, rows, **settings)
            return (tokens + 1) % logits.shape[1], top

    class LastOfEquals:
        @staticmethod
        def best_tokens(logits, rows=None):
            tokens, top = reference.best_tokens(logits.flip(1), rows)
            return logits.shape[1] - 1 - tokens, top

    with pytest.raises(AssertionError):
        contracts.check_choose_tokens(NextToken(), torch.bfloat16, 50, Limits())
    with pytest.raises(AssertionError):
        contracts.check_best_tokens(LastOfEquals(), torch.float32, 50)


def test_only_what_float32_cannot_tell_apart_has_two_places():
    """Of tokens 1 and 2 it cannot, of 3 and 4 it can; 5 and 6 are equal, and 7 lies beyond top_k."""
    logits = np.array([3.0, 2.0000003, 2.0, 1.000002, 1.0, 0.5, 0.5, 0.4])
    weights = np.exp(logits - 3.0)
    sums = weights.cumsum()
    limits = Limits(top_k=7)
    for token, first, last in ((0, 0, 0), (1, 1, 2), (2, 1, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6)):
        found = contracts.interval_of(token, logits, limits)
        np.testing.assert_allclose(found, (sums[first] - weights[first], sums[last], sums[6]), rtol=1e-12, atol=1e-12)
    start, end, _ = contracts.interval_of(7, logits, limits)
    assert start == end
    # without a limit the order is that of tokens, whatever they weigh
    np.testing.assert_allclose(contracts.interval_of(1, logits, Limits())[:2], sums[:2], rtol=1e-12)


def test_wrong_arguments_are_refused(cpu_kernels):
    logits = torch.zeros(2, 9)
    with pytest.raises(RuntimeError, match="row 2 is not in 2"):
        cpu_kernels.best_tokens(logits, torch.tensor([2]))
    with pytest.raises(RuntimeError, match="contiguous in its last dimension"):
        cpu_kernels.best_tokens(logits.T)
    with pytest.raises(RuntimeError, match="dtype must be"):
        cpu_kernels.best_tokens(logits.double())
    with pytest.raises(RuntimeError, match="from 1 to"):
        cpu_kernels.best_tokens(logits[:, :0])
    with pytest.raises(RuntimeError, match="an entry for each row"):
        cpu_kernels.choose_tokens(logits, None, **Limits().settings(np.zeros(3)))
    with pytest.raises(RuntimeError, match="top_k must be positive"):
        cpu_kernels.choose_tokens(logits, None, **Limits(top_k=0).settings(np.zeros(2)))
    with pytest.raises(RuntimeError, match="min_p must not be above 1"):
        cpu_kernels.choose_tokens(logits, None, **Limits(min_p=1.5).settings(np.zeros(2)))
    with pytest.raises(RuntimeError, match="temperature must be"):
        cpu_kernels.choose_tokens(logits, None, **Limits(temperature=float("nan")).settings(np.zeros(2)))
    with pytest.raises(RuntimeError, match="token 9 is not in a vocabulary of 9"):
        cpu_kernels.token_logprobs(logits, None, torch.tensor([9, 0]), 1)
    with pytest.raises(RuntimeError, match="between 0 and the vocabulary"):
        cpu_kernels.token_logprobs(logits, None, torch.tensor([0, 0]), 10)
    with pytest.raises(RuntimeError, match="as wide"):
        cpu_kernels.gather_logits(logits, torch.tensor([0]), torch.zeros(1, 8))
    mask = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="row 2 is not in 2"):
        cpu_kernels.apply_bitmask(torch.zeros(2, 9), torch.tensor([2]), mask)
    with pytest.raises(RuntimeError, match="the mask int32"):
        cpu_kernels.apply_bitmask(torch.zeros(2, 9), torch.tensor([0]), mask.long())


def test_objects_of_an_instruction_set_share_nothing(tmp_path):
    """See test_library.py."""
    try:
        compiler = build._compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    target = tmp_path / "sampling.o"
    flags = [*build.FLAGS, *build.X86.isas["avx512"], "-DQUIRE_ISA=avx512"]
    subprocess.run([compiler, *flags, "-c", str(build.SOURCES / "sampling_kernels.cpp"), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", "--defined-only", str(target)], check=True, capture_output=True, text=True)
    assert not {line.split()[1] for line in symbols.stdout.splitlines()} & set("WVu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_gpu(dtype):
    for vocab_size in (50, 20_011):
        contracts.check_best_tokens(kernels, dtype, vocab_size, "cuda")
        contracts.check_token_logprobs(kernels, dtype, vocab_size, 20, "cuda")
        for limits in LIMITS:
            contracts.check_choose_tokens(kernels, dtype, vocab_size, limits, "cuda")
    contracts.check_gather_logits(kernels, dtype, "cuda")
    contracts.check_penalise(kernels, "cuda")
    contracts.check_apply_bitmask(kernels, 5001, "cuda")
