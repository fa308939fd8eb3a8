"""A marked row has one token left; which of them may be chosen is what the draw would have allowed."""

import numpy as np
import pytest
import torch

from quire.config.watermark import Watermark
from quire.watermark import uniforms
from quire.worker.kernels import choose_tokens
from quire.worker.row_table import RowTable
from quire.worker.sampler.processors.processor import User
from quire.worker.sampler.processors.watermark import Marked, WatermarkRule, _kept, new_context

KEY = Watermark(key=7, context_width=2)


def test_contexts_count_once():
    output = np.array([5, 6, 7, 5, 6, 8, 5, 6])
    assert [None if (found := new_context(output[:end], 2)) is None else found.tolist() for end in range(9)] == [
        None, None, [5, 6], [6, 7], [7, 5], None, [6, 8], [8, 5], None,
    ]  # fmt: skip


@pytest.mark.parametrize("how", [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.6, 0.0), (1.0, 9, 0.5, 0.1)])
def test_what_a_draw_would_allow(how):
    """Every token that a draw finds is kept, and every one that is kept is found by some draw."""
    temperature, top_k, top_p, min_p = how
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    weights = np.exp((logits[0].numpy().astype(np.float64) - logits.max().item()) / np.float32(temperature))
    drawn = {
        int(
            choose_tokens(
                logits.clone(), None, temperature_n=torch.tensor([temperature]),
                top_k_n=torch.tensor([top_k or 1 << 60]), top_p_n=torch.tensor([top_p], dtype=torch.float64),
                min_p_n=torch.tensor([min_p]), uniform_n=torch.tensor([uniform], dtype=torch.float64),
            )[0]
        )
        for uniform in np.linspace(0, 0.99999, 4000)
    }  # fmt: skip
    kept = set(_kept(weights, Marked(*how)).tolist())
    assert drawn <= kept
    # a draw of these may be too rare to be seen
    assert all(weights[token] < 1e-3 for token in kept - drawn)


def test_a_large_nucleus_and_ties():
    weights = np.ones(5000)
    assert _kept(weights, Marked(1.0, 0, 0.5, 0.0)).tolist() == list(range(2500))
    assert _kept(weights, Marked(1.0, 3, 1.0, 0.0)).tolist() == [0, 1, 2]


def table_of(prompt: list[int], output: list[int]) -> RowTable:
    table = RowTable(2, 32, 50)
    table.token_ids[1, : len(prompt) + len(output)] = prompt + output
    table.num_prompt[1] = len(prompt)
    return table


def test_one_token_is_left_or_all():
    table = table_of([1, 2, 3], [4, 5, 6, 5, 6])
    rule = WatermarkRule(table, KEY)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    # too short, the context 5 6 for the first time, and once more
    users = [User(place, 1, length, Marked(1.0, 0, 1.0, 0.0)) for place, length in enumerate((4, 6, 8))]
    rule.apply(logits, users)
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[2], before[2])
    [left] = torch.isfinite(logits[1]).nonzero()[:, 0].tolist()
    assert logits[1, left] == before[1, left]
    probabilities = torch.softmax(before[1].double(), 0).numpy()
    numbers = uniforms(KEY, np.array([5, 6]), np.arange(50))
    assert left == np.argmax(np.log(numbers) / probabilities)


def test_rows_that_fail_still_fail():
    rule = WatermarkRule(table_of([1], [4, 5]), KEY)
    logits = torch.full((2, 50), -torch.inf)
    logits[1] = torch.nan
    rule.apply(logits, [User(place, 1, 3, Marked(1.0, 0, 1.0, 0.0)) for place in range(2)])
    assert not torch.isfinite(logits).any()
