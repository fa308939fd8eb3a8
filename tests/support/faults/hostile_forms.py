"""Forms that are hard to follow: grammars, expressions and schemas of nasty shapes, each from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.support.faults.streams import PROMPTS

MAX_TOKENS = 60
_TERMINALS = ('"a"', '"+"', '"("', '" "', "/[a-z]/", "/[a-z]+/", "/./", '"ab"', "/[^x]/", "/(a|b)+/", '""')
_CLASSES = ("[a-z]", ".", r"\w", r"[^\n]", r"\p{L}", "(a|aa)", "(a|ab|abc)", "[a-zA-Z0-9_]", "(x?y?)")
_COUNTS = (3, 30, 300, 3_000)
_MANY = (20, 200, 2_000)


def _ambiguous(chosen: random.Random) -> dict[str, Any]:
    """A rule whose alternatives are made of itself."""
    alternatives = [" ".join(["e"] * chosen.randint(2, 5)) for _ in range(chosen.randint(1, 4))]
    alternatives += [f"e {chosen.choice(_TERMINALS)} e", '"(" e ")"', *chosen.sample(_TERMINALS, 3)]
    return {"guided_grammar": f"start: e\ne: {' | '.join(alternatives)}"}


def _rules(chosen: random.Random) -> dict[str, Any]:
    """Rules that call each other: left recursion, right recursion, productions of nothing."""
    names = [f"r{number}" for number in range(chosen.randint(2, 8))]
    lines = ["start: r0"]
    for name in names:
        sides = [
            " ".join(chosen.choice([*names, *_TERMINALS]) for _ in range(chosen.randint(1, 4)))
            for _ in range(chosen.randint(1, 5))
        ]
        lines.append(f"{name}: {' | '.join([*sides, chosen.choice(_TERMINALS)])}")
    return {"guided_grammar": "\n".join(lines)}


def _nested_counters(chosen: random.Random) -> dict[str, Any]:
    pattern = chosen.choice(_CLASSES)
    for _ in range(chosen.randint(1, 3)):
        pattern = f"({pattern}{{{chosen.choice((0, 1))},{chosen.choice(_COUNTS)}}})"
    return {"guided_regex": pattern}


def _alternatives(chosen: random.Random) -> dict[str, Any]:
    """Which overlap, each with a counter."""
    sides = [f"{chosen.choice(_CLASSES)}{{1,{chosen.choice(_COUNTS)}}}{chr(97 + n % 26)}" for n in range(20)]
    return {"guided_regex": "|".join(sides)}


def _expression(chosen: random.Random) -> dict[str, Any]:
    parts = [
        chosen.choice(_CLASSES) + chosen.choice(("*", "+", "?", "{2,40}", "")) for _ in range(chosen.randint(2, 12))
    ]
    return {"guided_regex": "(" + "".join(parts) + ")" + chosen.choice(("*", "+", "{1,50}", ""))}


def _properties(chosen: random.Random) -> dict[str, Any]:
    """So many, all of which may be left out."""
    count = chosen.choice((50, 500, 5_000))
    return {"guided_json": {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}}


def _products(chosen: random.Random) -> dict[str, Any]:
    """Of choices."""
    word = chosen.choice(("anyOf", "oneOf", "allOf"))
    schema: dict[str, Any] = {"type": "string", "maxLength": chosen.choice(_COUNTS)}
    for _ in range(chosen.randint(1, 5)):
        schema = {word: [schema, {"type": "object", "properties": {"a": schema}}, {"type": "array", "items": schema}]}
    return {"guided_json": schema}


def _lists(chosen: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "pattern": "^(a|b)*$", "minLength": chosen.choice(_COUNTS)}
    for _ in range(chosen.randint(1, 4)):
        low = chosen.choice(_COUNTS[:3])
        schema = {"type": "array", "items": schema, "minItems": low, "maxItems": low * chosen.randint(1, 3)}
    return {"guided_json": schema}


def _choices(chosen: random.Random) -> dict[str, Any]:
    count = chosen.choice(_MANY)
    return {"guided_choice": ["a" * chosen.randint(1, 40) + str(number) for number in range(count)]}


def _recursion(chosen: random.Random) -> dict[str, Any]:
    names = [f"d{number}" for number in range(chosen.randint(1, 6))]
    inner = [{"$ref": f"#/$defs/{name}"} for name in names]
    definitions = {
        name: {
            "anyOf": [
                {"type": "array", "items": {"anyOf": inner}},
                {"type": "object", "additionalProperties": inner[0]},
            ]
        }
        for name in names
    }
    return {"guided_json": {"$defs": definitions, **inner[0]}}


def _response_format(chosen: random.Random) -> dict[str, Any]:
    schema = chosen.choice((_properties, _products, _lists, _recursion))(chosen)["guided_json"]
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "hard", "schema": schema}}}


_SHAPES: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    _ambiguous, _rules, _nested_counters, _alternatives, _expression, _properties, _products, _lists, _choices,
    _recursion, _response_format,
)  # fmt: skip


def form_of(seed: int) -> dict[str, Any]:
    """The fields of a request that make it bound to a form."""
    chosen = random.Random(seed)
    return chosen.choice(_SHAPES)(chosen)


def request_of(seed: int, *, is_bound: bool = True) -> dict[str, Any]:
    """is_bound=False: the same request without its form."""
    chosen = random.Random(-seed - 1)
    request: dict[str, Any] = {
        "prompt": chosen.choice(PROMPTS),
        "max_tokens": MAX_TOKENS,
        "temperature": chosen.choice((0, 1)),
        "n": chosen.choices((1, 2, 8, 32, 128), (60, 25, 12, 2, 1))[0],
        "seed": seed,
        "stream": chosen.random() < 0.3,
    }
    return {**request, **form_of(seed)} if is_bound else request
