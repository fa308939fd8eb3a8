"""A mark is found by who has the key, and by nobody else; the text is drawn with the probabilities that it had."""

import numpy as np
import pytest

from quire.config.watermark import Watermark
from quire.errors import OptionError, RequestError
from quire.watermark import WatermarkDetector, uniforms

KEY = Watermark(key=42)


def marked(length: int, weights: np.ndarray, watermark: Watermark, seed: int = 0) -> list[int]:
    """As an engine draws it, without its rules for the first tokens."""
    draws = np.random.default_rng(seed)
    tokens = draws.integers(len(weights), size=watermark.context_width).tolist()
    ids = np.arange(len(weights))
    while len(tokens) < length:
        context = np.array(tokens[-watermark.context_width :])
        tokens.append(int(np.argmax(np.log(uniforms(watermark, context, ids)) / weights)))
    return tokens


WEIGHTS = np.full(64, 1 / 64)


@pytest.mark.parametrize("given", ["a text", ["a", "text"], [[1, 2], [3, 4]], [0.5]])
def test_a_text_is_no_list_of_tokens(given):
    with pytest.raises(RequestError, match="tokenized first"):
        WatermarkDetector(42).detect(given)


def test_found_with_the_key_alone():
    tokens = marked(80, WEIGHTS, KEY)
    found = WatermarkDetector(42).detect(tokens)
    assert found.is_watermarked
    assert found.p_value < 1e-12
    assert found.num_scored_tokens == 76
    for detector in (WatermarkDetector(43), WatermarkDetector(42, context_width=3)):
        assert not detector.detect(tokens).is_watermarked
    # a part of a text, and one of which some was changed
    assert WatermarkDetector(42).detect(tokens[30:70]).is_watermarked
    changed = [0 if place % 12 == 0 else token for place, token in enumerate(tokens)]
    assert WatermarkDetector(42).detect(changed).is_watermarked


def test_chance_is_not_called_a_mark():
    draws = np.random.default_rng(3)
    chances = [WatermarkDetector(42).detect(draws.integers(64, size=60)).p_value for _ in range(2000)]
    # evenly spread, as a p-value is where nothing is there
    for share in (0.01, 0.1, 0.5, 0.9):
        assert np.mean(np.array(chances) <= share) == pytest.approx(share, abs=4 * (share * (1 - share) / 2000) ** 0.5)


def test_too_little_says_nothing():
    for tokens in ([], [1, 2, 3], [1, 2, 3, 4]):
        found = WatermarkDetector(42).detect(tokens)
        assert (found.is_watermarked, found.p_value, found.score, found.num_scored_tokens) == (False, 1.0, 0.0, 0)
    assert WatermarkDetector(42, context_width=1).detect([1, 1, 1, 1]).num_scored_tokens == 1


def test_each_token_is_drawn_with_its_probability():
    weights = np.array([0.5, 0.25, 0.2, 0.05])
    ids = np.arange(4)
    counts = np.zeros(4)
    for context in range(20_000):
        numbers = uniforms(KEY, np.array([context, 0, 0, 0]), ids)
        counts[np.argmax(np.log(numbers) / weights)] += 1
    assert counts / 20_000 == pytest.approx(weights, abs=0.015)


@pytest.mark.parametrize(
    "config",
    [{}, {"key": -1}, {"key": 1 << 64}, {"key": True}, {"key": "42"}, {"key": 1, "context_width": 0},
     {"key": 1, "context_width": 65}, {"key": 1, "algorithm": "dual_key_gumbel"}, {"key": 1, "widht": 3}],
)  # fmt: skip
def test_refused(config):
    with pytest.raises(OptionError, match="watermark_config"):
        Watermark.of(config)


def test_the_key_is_not_shown():
    assert "42" not in repr(Watermark.of({"key": 42, "algorithm": "gumbel"}))
