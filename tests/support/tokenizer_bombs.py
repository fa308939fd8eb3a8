"""Files tokenizer.json that take any amount of time or memory, or end the process that loads them, by what they do."""

from __future__ import annotations

import json
from typing import Any

ALPHABET = [chr(code) for code in range(33, 127)] + ["é", "Ġ"]


def tokenizer(**sections: Any) -> dict[str, Any]:
    vocab = {letter: number for number, letter in enumerate(ALPHABET)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "a", **sections.pop("model", {})}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **sections,
    }  # fmt: skip


def split(pattern: str) -> dict[str, Any]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=part)


def replaced(*pairs: tuple[str, str]) -> dict[str, Any]:
    parts = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]
    return tokenizer(normalizer={"type": "Sequence", "normalizers": parts})


def nested(depth: int, kind: str = "normalizer", name: str = "normalizers") -> str:
    """As a text, because what writes JSON has its own bound of depth."""
    part = f'{{"type": "Sequence", "{name}": [' * depth + "]}" * depth
    return json.dumps(tokenizer()).replace(f'"{kind}": null', f'"{kind}": {part}')


def template(count: int) -> dict[str, Any]:
    return tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * count,
            "pair": [],
            "special_tokens": {},
        }
    )


NESTED_PLUS = split("(a+)+$")["pre_tokenizer"]

# JSON, or its text
BOMBS: dict[str, Any] = {
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
    "hidden behind another section's key": tokenizer(pre_tokenizer={**NESTED_PLUS, "normalizers": []}),
    "hidden behind its own key": tokenizer(pre_tokenizer={**NESTED_PLUS, "pretokenizers": []}),
    "a sequence that holds another section's": tokenizer(
        pre_tokenizer={"type": "Sequence", "normalizers": [], "pretokenizers": [NESTED_PLUS]}
    ),
    "a part whose type is a list": tokenizer(normalizer={"type": []}),
    "added tokens that are a number": tokenizer(added_tokens=5),
    "a list": [],
    "a number": 5,
}
