"""The start-up file of pinned prefixes: strict, and every mistake named by entry and field."""

import json

import pytest

from quire import LLM, OptionError
from quire.interfaces.prefix_file import read_prefix_file


def written(path, content) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_three_forms(tmp_path):
    entries = [
        {"name": "a", "text": "Hello"},
        {"name": "b", "messages": [{"role": "system", "content": "Be kind."}], "cache_salt": "x"},
        {"name": "c", "token_ids": [1, 2]},
    ]
    specs = read_prefix_file(written(tmp_path / "p.json", entries))
    assert [(spec.name, spec.prompt, spec.cache_salt) for spec in specs] == [
        ("a", "Hello", ""),
        ("b", [{"role": "system", "content": "Be kind."}], "x"),
        ("c", [1, 2], ""),
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not valid JSON"),
        (b'[{"name": "\xff"}]', "is not valid JSON"),
        (["text"], "entry 0: must be an object"),
        ({"name": "a"}, "must hold a JSON list"),
        ([{"text": "a"}], "entry 0.*missing required field `name`"),
        ([{"name": "a", "text": "x"}, {"name": 3, "text": "x"}], "entry 1.*`str`, got `int`.*name"),
        ([{"name": "a", "token_ids": [1, "2"]}], "entry 0.*`int`, got `str`.*token_ids"),
        ([{"name": "a", "txt": "x"}], "entry 0: 'txt' is not one of.*Did you mean \"text\""),
        ([{"name": "a"}], "entry 0: text or messages or token_ids: 0 of them"),
        ([{"name": "a", "text": "x", "token_ids": [1]}], "entry 0: .*2 of them"),
        ([{"name": "a", "messages": []}], "entry 0: messages: there are none"),
        ([{"name": "a b", "text": "x"}], "entry 0: name='a b'"),
        ([{"name": "a", "text": "x"}, {"name": "a", "text": "y"}], "entry 1: name='a' is the name of an earlier entry"),
    ],
)
def test_mistakes(tmp_path, content, text):
    path = written(tmp_path / "p.json", content)
    with pytest.raises(OptionError, match=text) as caught:
        read_prefix_file(path)
    assert str(caught.value).startswith(f"pinned_prefixes={path}: ")


def test_a_mistake_shows_before_anything_is_loaded(tmp_path):
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        LLM(pinned_prefixes=str(tmp_path / "missing.json"))
