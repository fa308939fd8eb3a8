"""What may be drawn and how often, against a plain computation of the distribution in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.kernels.reference import draw
from quire.worker.sampler.choose import DrawSettings, choose_tokens

ALL = 2**62


def distribution(logits, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0):
    """Probabilities by the definitions: min_p, then top_k, then top_p over what is left."""
    scaled = np.array(logits, dtype=np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    kept = order[:top_k]
    mass = sum(probabilities[token] for token in kept)
    nucleus, so_far = [], 0.0
    for token in kept:
        if so_far >= top_p * mass and top_p < 1:
            break
        nucleus.append(token)
        so_far += probabilities[token]
    result = np.zeros(len(logits))
    result[nucleus] = probabilities[nucleus] / probabilities[nucleus].sum()
    return result


def settings(count, uniform, temperature=1.0, top_k=ALL, top_p=1.0, min_p=0.0):
    return DrawSettings(
        temperature=np.full(count, temperature, dtype=np.float32),
        top_k=np.full(count, top_k, dtype=np.int64),
        top_p=np.full(count, top_p, dtype=np.float64),
        min_p=np.full(count, min_p, dtype=np.float32),
        uniform=np.asarray(uniform, dtype=np.float64),
    )


def frequencies(logits, count=4000, **parameters):
    """Evenly spread numbers instead of random ones: a frequency is within 1 / count of its probability."""
    rows = torch.tensor([logits], dtype=torch.float32).repeat(count, 1)
    tokens, _ = choose_tokens(rows, settings(count, (np.arange(count) + 0.5) / count, **parameters))
    return np.bincount(tokens.numpy(), minlength=len(logits)) / count


LOGITS = [1.0, -2.0, 0.5, 3.0, 0.0, 2.5, -1.0, 1.5]
# 300 tokens: two chunks of the vocabulary, and more than the first guess of a nucleus
WIDE = (np.sin(np.arange(300) * 1.7) * 3).tolist()
CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 7},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 100, "top_p": 0.9, "temperature": 2.0},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.2, "temperature": 1.7},
    {"top_p": 0.8, "min_p": 0.3},
]


@pytest.mark.parametrize("parameters", CASES, ids=str)
@pytest.mark.parametrize("logits", [LOGITS, WIDE], ids=["8", "300"])
def test_frequencies_are_the_probabilities(logits, parameters):
    expected = distribution(logits, **parameters)
    found = frequencies(logits, **parameters)

    assert (found[expected == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=1.5 / 4000)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_ties_are_cut_in_the_order_of_ids(parameters):
    logits = [1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 0.0, 0.0] * 40
    expected = distribution(logits, **parameters)
    found = frequencies(logits, count=2000, **parameters)

    np.testing.assert_allclose(found, expected, atol=1.5 / 2000)


@given(
    st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=20),
    st.floats(0.2, 4),
    st.sampled_from([ALL, 1, 2, 5]),
    st.sampled_from([1.0, 0.9, 0.5, 0.1]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.floats(0, 1, exclude_max=True),
)
def test_nothing_outside_of_the_distribution_is_drawn(logits, temperature, top_k, top_p, min_p, uniform):
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    token = int(choose_tokens(torch.tensor([logits]), settings(1, [uniform], **parameters))[0])
    # float32 against float64 may disagree on which side of a limit a token lies; loosen the limits a little
    loose = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": min(1.0, top_p + 1e-5),
        "min_p": min_p * (1 - 1e-5),
    }

    assert distribution(logits, **loose)[token] > 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-48])
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_the_ends_of_the_interval_draw_possible_tokens(uniform, parameters):
    logits = [-torch.inf, *LOGITS, -torch.inf] * 60 + [-torch.inf] * 5
    token = int(choose_tokens(torch.tensor([logits]), settings(1, [uniform], **parameters))[0])

    assert np.isfinite(logits[token])


def test_a_large_nucleus_equals_the_sorted_one():
    generator = torch.Generator().manual_seed(1)
    # coarse values: many ties, and every drawer holds many tokens
    weights = (torch.randn(5000, generator=generator) / 4).exp().bfloat16().float()
    weights /= weights.max()
    uniform = (np.arange(500) + 0.5) / 500
    for top_p in (0.3, 0.77, 0.999):
        long_way = [draw._draw_from_large_nucleus(weights.numpy(), top_p, float(number)) for number in uniform]
        rows = weights.repeat(500, 1)
        sorted_way = draw.draw_from_top_k(
            rows, torch.full((500,), 5000), 5000, torch.full((500,), top_p), torch.from_numpy(uniform)
        )

        assert long_way == sorted_way.tolist()


def test_greedy_rows_take_the_lowest_of_equal_tokens():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 5.0, 0.0]])
    tokens, top = choose_tokens(logits, settings(2, [0.5, 0.5], temperature=0.0))

    assert tokens.tolist() == [1, 0]
    assert top.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_draws_the_same_alone_and_among_others(num_threads):
    """Bit for bit: the same weights and the same number, whatever else is in the batch."""
    random = np.random.default_rng(5)
    count, vocab_size = 64, 40_000
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(count, vocab_size, generator=generator) * 2).bfloat16().float()
    mixed = DrawSettings(
        temperature=random.choice([0.0, 0.5, 1.0, 3.0], count).astype(np.float32),
        top_k=random.choice([1, 40, 5000, ALL, ALL], count),
        top_p=random.choice([0.3, 0.99, 1.0, 1.0], count),
        min_p=random.choice([0.0, 0.0, 0.02], count).astype(np.float32),
        uniform=random.random(count),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = choose_tokens(logits.clone(), mixed)[0].tolist()
        alone = [int(choose_tokens(logits[i : i + 1].clone(), mixed.select(np.array([i])))[0]) for i in range(count)]
    finally:
        torch.set_num_threads(before)

    assert together == alone
