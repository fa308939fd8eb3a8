"""Positions as a bias: whole or some queries at a time, the same numbers; and never more of them than are allowed."""

import pytest
import torch

from quire.testing.model_harness import worker_config
from quire.testing.source_checkpoints import make_source_checkpoint
from quire.worker.layers import relative_bias
from quire.worker.layers.relative_bias import BiasOfAll
from quire.worker.model_loader import load_model

NUM_HEADS = 3
MOST = 5


@pytest.mark.parametrize("most_numbers", [1, 3 * 20, 7 * 3 * 20, 1 << 24])
@pytest.mark.parametrize("num_tokens", [1, 2, 20])
def test_blocks_together_are_the_whole(num_tokens, most_numbers, monkeypatch):
    monkeypatch.setattr(relative_bias, "_MOST_NUMBERS", most_numbers)
    bias_HR = torch.randn(NUM_HEADS, 2 * MOST + 1, generator=torch.Generator().manual_seed(0))
    blocks = list(BiasOfAll(bias_HR, num_tokens).blocks())
    assert [row for rows, _ in blocks for row in range(rows.start, rows.stop)] == list(range(num_tokens))
    assert max(part.numel() for _, part in blocks) <= max(most_numbers, NUM_HEADS * num_tokens)
    place_T = torch.arange(num_tokens)
    back_TT = (place_T[:, None] - place_T).clamp(-MOST, MOST)
    assert torch.equal(torch.cat([part for _, part in blocks], dim=1), bias_HR[:, back_TT + MOST])


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_a_long_source_is_encoded_in_blocks(kind, tmp_path, monkeypatch):
    """Of umt5 each layer has a bias of its own."""
    model = load_model(worker_config(make_source_checkpoint(tmp_path / "m", kind), max_model_len=64))
    source = torch.arange(5, 55)
    expected = model.encode(source)
    monkeypatch.setattr(relative_bias, "_MOST_NUMBERS", 7 * 4 * 50)
    torch.testing.assert_close(model.encode(source), expected, atol=1e-5, rtol=1e-5)
