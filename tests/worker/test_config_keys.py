"""Keys that are laid over config.json: those that somebody takes, and those that nobody does."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.errors import OptionError
from quire.worker.config_keys import check_added_keys

LLAMA = {"model_type": "llama", "hidden_size": 8}
LLAVA = {"model_type": "llava", "text_config": {"model_type": "qwen2"}, "vision_config": {"model_type": "clip"}}


@pytest.mark.parametrize(
    ("hf_config", "added"),
    [
        (LLAMA, ["rope_theta", "rope_scaling", "torch_dtype", "seq_length", "head_dim", "attention_bias", "id2label"]),
        (LLAMA, ["quantization_config", "architectures", "num_labels", "problem_type"]),
        # of the parts, wherever they are written
        (LLAVA, ["text_config.use_sliding_window", "vision_config.projection_dim", "image_token_index"]),
        # by the name that Transformers' class maps to another
        ({"model_type": "gpt2"}, ["hidden_size", "n_embd"]),
    ],
)
def test_what_a_configuration_takes(hf_config: dict[str, Any], added: list[str]) -> None:
    check_added_keys(added, hf_config, None)


@pytest.mark.parametrize(
    ("hf_config", "added", "says"),
    [
        (LLAMA, "rope_teta", 'rope_teta: .* model_type=llama nor Quire .* Did you mean "rope_theta"'),
        (LLAVA, "text_config.hiden_size", 'text_config.hiden_size: .* Did you mean "hidden_size"'),
        (LLAMA, "colour", r"colour: .* has such a key\. Correct it"),
        (LLAMA, "k" * 100_000, "k{80}: neither"),
    ],
)
def test_what_nobody_takes(hf_config: dict[str, Any], added: str, says: str) -> None:
    with pytest.raises(OptionError, match=f"^hf_overrides: {says}"):
        check_added_keys(["head_dim", added], hf_config, None)


class Own:
    config_defaults = {"num_stripes": 3}
    config_names = {"stripes": "num_stripes"}


def test_a_class_of_ones_own_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    """Transformers does not know it, so that the rest is a warning."""
    with caplog.at_level(logging.WARNING):
        check_added_keys(["num_stripes", "stripes"], {"model_type": "zebra"}, Own)
        assert not caplog.messages
        check_added_keys(["num_strips"], {"model_type": "zebra"}, Own)
    assert 'Did you mean "num_stripes"?' in caplog.text


def test_code_that_comes_with_a_model_may_take_more(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_added_keys(["colour"], {**LLAMA, "auto_map": {"AutoConfig": "configuration.Config"}}, None)
    assert "hf_overrides: colour" in caplog.text
