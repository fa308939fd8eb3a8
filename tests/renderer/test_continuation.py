"""Texts that follow other tokens: no special tokens around them, no space that was not written."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from quire.renderer import Renderer

LETTERS = ["<s>", "<unk>", *"▁\nHelowrd"]


def sentencepiece_like(tmp_path) -> Renderer:
    """One that puts a space before the first word and a BOS before the text, as Llama 2 does."""
    vocab = {letter: number for number, letter in enumerate(LETTERS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    backend.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return Renderer.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["Hello", " world", "\nHello", "lo", ""])
def test_two_parts_read_as_the_whole(tmp_path, text):
    renderer = sentencepiece_like(tmp_path)
    first = renderer.render_prompt("Hello").token_ids
    rest = renderer.render_continuation(text, max_tokens=100)
    assert 0 not in rest
    assert renderer.decode(first + rest) == "Hello" + text


def test_without_care_a_space_would_stand_there(tmp_path):
    renderer = sentencepiece_like(tmp_path)
    first = renderer.render_prompt("Hello").token_ids
    assert renderer.decode(first + renderer.encode("lo", add_special_tokens=False)) == "Hello lo"
