"""A tokenizer.json that takes any amount of time or memory, or ends its process, is refused before it is loaded."""

import json

import pytest
from tests.support.tokenizer_bombs import BOMBS, split

from quire.errors import ModelError, RequestError
from quire.renderer import NotBriefError, Renderer, tokenizer_gate
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.tokenizer import Tokenizer
from quire.testing import tiny_tokenizers


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(tmp_path, name):
    file = tmp_path / "tokenizer.json"
    bomb = BOMBS[name]
    file.write_text(bomb if isinstance(bomb, str) else json.dumps(bomb))
    with pytest.raises(ModelError) as refused:
        Renderer.from_folder(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"{file}: ")
    assert "\n" not in said
    assert len(said) < 1_000


@pytest.mark.parametrize("make", "byte_level byte_fallback tiktoken unigram_bytes metaspace word_piece".split())
def test_ordinary_ones_are_known_to_be_harmless(make):
    content = json.loads(getattr(tiny_tokenizers, make)().to_str())
    # this expression is nobody's
    assert tokenizer_gate.unknown_part(content) == ("pre_tokenizer of the type Split" if make == "tiktoken" else "")


def test_one_that_is_not_known_is_tried_and_never_runs_on_an_event_loop(tmp_path):
    """It is loaded when nothing bad has come of it."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(split("[aeiou]+|[^aeiou]")))
    renderer = Renderer.from_folder(tmp_path)
    assert renderer.render_prompt("hello").token_ids
    with pytest.raises(NotBriefError):
        renderer.render_prompt("hello", is_brief=True)


def test_a_panic_of_the_library_is_an_error_of_the_request(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(split("(a+)+$")))
    from tokenizers import Tokenizer as Backend

    loaded = Tokenizer(Backend.from_file(str(tmp_path / "tokenizer.json")), SpecialTokens())
    for long in ("a" * 40 + "!", "a" * 4_000 + "!"):
        with pytest.raises(RequestError, match="the model's tokenizer fails on it"):
            loaded.encode(long, add_special_tokens=False)
    assert loaded.encode("abc", add_special_tokens=False)
