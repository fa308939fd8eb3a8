"""A tokenizer.json that takes any amount of time or memory, or ends its process, is refused before it is loaded."""

import json

import pytest

from quire.errors import ModelError, RequestError
from quire.renderer import NotBriefError, Renderer, tokenizer_gate
from quire.renderer.special_tokens import SpecialTokens
from quire.renderer.tokenizer import Tokenizer
from quire.testing import tiny_tokenizers

ALPHABET = [chr(code) for code in range(33, 127)] + ["é", "Ġ"]


def tokenizer(**sections):
    vocab = {letter: number for number, letter in enumerate(ALPHABET)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "a", **sections.pop("model", {})}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **sections,
    }  # fmt: skip


def split(pattern):
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=part)


def replaced(*pairs):
    parts = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]
    return tokenizer(normalizer={"type": "Sequence", "normalizers": parts})


def nested(depth, kind="normalizer", name="normalizers"):
    """As a text, because what writes JSON has its own bound of depth."""
    part = f'{{"type": "Sequence", "{name}": [' * depth + "]}" * depth
    return json.dumps(tokenizer()).replace(f'"{kind}": null', f'"{kind}": {part}')


def template(count):
    return tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * count,
            "pair": [],
            "special_tokens": {},
        }
    )


BOMBS = {
    "nested plus": split("(a+)+$"),
    "nested star": split("(a*)*b"),
    "alternatives": split("(a|a)*b"),
    "alternatives that overlap": split("(a|aa)+$"),
    "nested groups": split("((a+)+)+$"),
    "three stars": split("a*a*a*a*a*b"),
    "dots": split(".*.*.*.*=.*[0-9]$"),
    "words": split(r"(\w+\s?)+$"),
    "spaces": split(r"(\s+)+x"),
    "digits": split(r"(\d+)*\."),
    "a counter of counters": split("((a{1,300}){1,300}){1,300}b"),
    "a back reference": split(r"(a*)*\1b"),
    "a look behind": split("(?<=a)(a+)+$"),
    "no expression": split("(((("),
    "a long expression": split("(" * 20_000 + "a" + ")" * 20_000),
    "replacements of replacements": replaced(*[("a", "a" * 100)] * 6),
    "each a hundred": replaced(*[(chr(97 + n), chr(98 + n) * 100) for n in range(6)]),
    "a long replacement": replaced(("a", "a" * 10_000_000)),
    "an empty pattern": replaced(*[("", "aaaaaaaa")] * 8),
    "nine small ones": replaced(*[("a", "aaaaaaaaaaaaaaaa")] * 8),
    "a regular expression that grows": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    ),
    "any letter becomes many": tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100_000}
    ),
    "a long prefix": tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 50_000_000}),
    "nested normalizers": nested(5_000),
    "nested pre-tokenizers": nested(5_000, "pre_tokenizer", "pretokenizers"),
    "nested decoders": nested(5_000, "decoder", "decoders"),
    "no character map": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA////" * 1000}),
    "a character map of nothing": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an unknown part": tokenizer(normalizer={"type": "Bomb"}),
    "an unknown model": tokenizer(model={"type": "Bomb"}),
    "a text repeated": template(1_000_000),
    "long words": tokenizer(
        model={"type": "WordPiece", "max_input_chars_per_word": 10**9, "continuing_subword_prefix": "##"}
    )
    | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
    "merges that are not there": tokenizer(model={"merges": ["zz yy", "yy zz"]}),
    "ids beyond": tokenizer(model={"vocab": {"a": 2**40}}),
    "negative ids": tokenizer(model={"vocab": {"a": -1}}),
    "added tokens of nothing": tokenizer(added_tokens=[{"id": 5}]),
    "an added token that is a number": tokenizer(added_tokens=[{"id": 2**40, "content": 5, "special": True}]),
    "a decoder that grows": tokenizer(
        decoder={"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1_000_000}
    ),
    "a list": [],
    "a number": 5,
}
assert len(BOMBS) >= 40


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
