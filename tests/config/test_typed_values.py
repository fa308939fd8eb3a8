"""Values as people type them: numbers with a letter behind, and objects in place of words."""

import json

import pytest

from quire.config.engine_options import EngineOptions
from quire.config.generation_config import NAMES
from quire.config.option import options_of
from quire.errors import OptionError
from quire.interfaces.setup import configured, default_sampling_params
from quire.testing.fake_engine import write_byte_checkpoint


@pytest.mark.parametrize(
    ("text", "value"), [("32k", 32_000), ("32K", 32_768), ("1.5K", 1536), ("1m", 10**6), ("7", 7), ("1_000", 1000)]
)
def test_numbers_with_a_letter(text, value):
    assert options_of(EngineOptions)["max_model_len"].check(text) == value


@pytest.mark.parametrize("text", ["k", "3kk", "3g", "-1k", "1e3", "3 k", "1." + "9" * 400 + "k"])
def test_letters_that_mean_nothing(text):
    with pytest.raises(OptionError, match="must be a whole number of tokens"):
        options_of(EngineOptions)["max_model_len"].check(text)


def test_an_object_stands_in_place_of_what_the_authors_recommend(tmp_path):
    folder = write_byte_checkpoint(tmp_path, generation_config={"temperature": 0.3, "top_k": 5})

    def recommended(asked):
        return default_sampling_params(configured({"model": str(folder), "generation_config": asked}))

    assert (recommended("auto").temperature, recommended("auto").top_k) == (0.3, 5)
    assert recommended("none").top_k == 0
    other = recommended(json.dumps({"temperature": 0.9, "max_new_tokens": 7}))
    assert (other.temperature, other.top_k, other.max_tokens) == (0.9, 5, 7)
    assert {getattr(other, ours) is not None for ours in NAMES.values()} == {True}
    for asked, words in (
        ("vllm?", "must be auto, none or a JSON object"),
        ("[1]", "must be auto, none or a JSON object"),
        ('{"temprature": 1}', 'temprature: cannot be recommended. Did you mean "temperature"'),
        ('{"do_sample": true}', "It may have temperature"),
    ):
        with pytest.raises(OptionError, match=words):
            recommended(asked)
