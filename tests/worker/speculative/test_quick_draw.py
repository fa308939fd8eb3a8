"""A draft draws what the sampler would draw out of the same logits."""

import numpy as np
import pytest
import torch

from quire.worker.sampler.choose import DrawSettings, choose_tokens
from quire.worker.speculative.quick_draw import choose_quickly

VOCAB_SIZE = 700
NUM_ROWS = 10
LIMITS = {
    "none": ([2**40], [1.0], [0.0]),
    "top_k": ([1, 5, 40], [1.0], [0.0]),
    "top_p": ([2**40], [0.1, 0.9], [0.0]),
    "all": ([2**40, 30, 2], [1.0, 0.8], [0.0, 0.05]),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_the_same_tokens_as_the_sampler(limits):
    rng = np.random.default_rng(1)
    top_k, top_p, min_p = LIMITS[limits]
    for _ in range(30):
        logits = torch.from_numpy(rng.normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32) * 3)
        settings = DrawSettings(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.5], NUM_ROWS).astype(np.float32),
            top_k=rng.choice(top_k, NUM_ROWS),
            top_p=rng.choice(top_p, NUM_ROWS),
            min_p=rng.choice(min_p, NUM_ROWS).astype(np.float32),
            uniform=rng.random(NUM_ROWS),
        )
        quick = choose_quickly(logits.clone(), settings)
        assert quick.tolist() == choose_tokens(logits, settings)[0].tolist()


def test_greedy_rows_and_unusable_logits():
    logits = torch.tensor([[0.0, 2.0, 1.0], [float("nan"), 1.0, 0.0]])
    settings = DrawSettings(
        temperature=np.array([0.0, 1.0], dtype=np.float32),
        top_k=np.array([2, 2]),
        top_p=np.array([0.5, 0.5]),
        min_p=np.zeros(2, dtype=np.float32),
        uniform=np.array([0.5, 0.5]),
    )
    assert choose_quickly(logits, None)[0] == 1
    first, second = choose_quickly(logits, settings).tolist()
    assert first == 1
    assert 0 <= second < 3
