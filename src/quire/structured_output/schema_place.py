"""Where in a JSON schema the mistake is: the library says what is wrong, but not at which place.

The innermost subschema that is refused by itself is the place. That needs no list of keywords that the library knows,
and is asked only when a whole schema was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# What holds subschemas: by name, in a list, or one. Definitions first: whoever refers to a wrong one is not to blame.
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_IN_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_DEFINITIONS = ("$defs", "definitions")
_MOST_LOOKS = 1000


def place_of_error(schema: Any, refusal_of: Callable[[Any], str | None]) -> tuple[str, str] | None:
    """(JSON pointer, reason) of the innermost subschema that is refused; None if only the whole is."""
    if not isinstance(schema, dict):
        return None
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    for number, (pointer, inner) in enumerate(_subschemas(schema, "")):
        if number == _MOST_LOOKS:
            return None
        reason = refusal_of({**shared, **inner} if isinstance(inner, dict) else inner)
        if reason is not None:
            return pointer, reason
    return None


def _subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, Any]]:
    """Innermost first. `false` is no mistake by itself: it forbids a property."""
    for path, inner in _children(schema):
        if isinstance(inner, dict):
            yield from _subschemas(inner, pointer + path)
            yield pointer + path, inner


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _BY_NAME:
        named = schema.get(keyword)
        if isinstance(named, dict):
            yield from ((f"/{keyword}/{_escaped(name)}", inner) for name, inner in named.items())
    for keyword in (*_IN_LIST, *_SINGLE):
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from ((f"/{keyword}/{number}", inner) for number, inner in enumerate(value))
        elif value is not None:
            yield f"/{keyword}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
