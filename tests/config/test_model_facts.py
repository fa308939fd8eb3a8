"""What config.json says of models with an encoder and a decoder: a mistake is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.model_facts import ModelFacts
from quire.errors import ModelError

T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 320, "pad_token_id": 0}


def facts_of(folder: Path, **values: Any) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps({**T5, **values}))
    return ModelFacts.read(folder)


def test_what_is_written_begins_with_the_padding_where_nothing_is_said(tmp_path: Path) -> None:
    assert facts_of(tmp_path, pad_token_id=7).decoder_start_token_id == 7
    assert facts_of(tmp_path, decoder_start_token_id=3).decoder_start_token_id == 3


@pytest.mark.parametrize("given", [[1, 2], [], [3], "a", True, 1.0, -1, 320, 10**30], ids=str)
def test_a_first_token_that_is_none(given: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: decoder_start_token_id=.* from 0 to 319\. Correct") as caught:
        _ = facts_of(tmp_path, decoder_start_token_id=given).decoder_start_token_id
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["relative_attention_max_distance", "d_kv", "d_ff", "num_decoder_layers"])
def test_numbers_that_no_such_model_has(name: str, tmp_path: Path) -> None:
    """Tables have a row for each."""
    for given in (0, -1, 10**9):
        with pytest.raises(ModelError, match=f"{name}={given} must be a whole number from 1 to"):
            facts_of(tmp_path, **{name: given})
