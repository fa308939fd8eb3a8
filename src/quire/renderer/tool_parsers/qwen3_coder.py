"""Qwen 3 Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

A value is bare text; the schema of the tool says whether it stands for a text or for any other JSON value. It is never
evaluated. `<tool_call>` may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.renderer.output_parsing.answer import Malformed
from quire.renderer.output_parsing.format import ToolFormat
from quire.renderer.output_parsing.json_text import decoded
from quire.renderer.output_parsing.reader import MAX_HELD, Reader, Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_LABEL = re.compile(r"[^<>\n]+")


def _read(reader: Reader) -> Steps[None]:
    while mark := (yield from reader.content_until((_OPEN, _FUNCTION))):
        yield from reader.attempt(mark, _call(reader, has_opening=mark == _OPEN))


def _call(reader: Reader, *, has_opening: bool) -> Steps[None]:
    if has_opening:
        yield from reader.expect(_FUNCTION)
    name = yield from _label(reader)
    # the first tag says whether this is a call
    is_empty = not (yield from _parameter_follows(reader))
    reader.start_call(name)
    schemas = _schemas(reader.functions.get(name, {}))
    opening = "{"
    while not is_empty:
        key = yield from _label(reader)
        reader.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(reader, schemas.get(key))
        opening = ", "
        is_empty = not (yield from _parameter_follows(reader))
    reader.arguments("{}" if opening == "{" else "}")
    reader.end_call()
    yield from reader.next_letter()
    yield from reader.literal(_CLOSE)


def _parameter_follows(reader: Reader) -> Steps[bool]:
    yield from reader.next_letter()
    if (yield from reader.literal(_PARAMETER)):
        return True
    yield from reader.expect(_END_OF_FUNCTION)
    return False


def _label(reader: Reader) -> Steps[str]:
    label = yield from reader.word(_LABEL)
    if not (yield from reader.literal(">")):
        raise Malformed
    return label.strip()


def _schemas(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(reader: Reader, schema: object) -> Steps[None]:
    """What stands between the tags, without one line end at each side."""
    kinds = _kinds_of(schema)
    if kinds <= {"string"}:
        text = _JsonString(reader)
        reader.arguments('"')
        if not (yield from reader.until((_END_OF_PARAMETER,), text.write)):
            raise Malformed
        reader.arguments('"')
    else:
        parts: list[str] = []
        num_held = 0

        def hold(part: str) -> None:
            nonlocal num_held
            num_held += len(part)
            if num_held > MAX_HELD:
                raise Malformed
            parts.append(part)

        if not (yield from reader.until((_END_OF_PARAMETER,), hold)):
            raise Malformed
        reader.arguments(_converted("".join(parts), kinds))


class _JsonString:
    """Writes bare text as the inside of a JSON string, without a line end at its beginning and at its end."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._is_begun = False
        self._held = ""

    def write(self, text: str) -> None:
        if not self._is_begun:
            self._is_begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        if text:
            self._reader.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _kinds_of(schema: object) -> set[str]:
    """Types that a schema allows; text where it says nothing."""
    if not isinstance(schema, Mapping):
        return {"string"}
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return {kind for one in schema[name] for kind in _kinds_of_choice(one)}
    enum = schema.get("enum")
    return {_kind_of(value) for value in enum} if isinstance(enum, list) else {"string"}


def _kinds_of_choice(schema: object) -> set[str]:
    kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
    return {kind} if isinstance(kind, str) else {"any"}


def _converted(text: str, kinds: set[str]) -> str:
    """As JSON: the value that it spells if the schema allows such, else a text."""
    text = text.removeprefix("\n").removesuffix("\n")
    bare = text.strip()
    spelt = bare.lower() if bare in ("True", "False", "None", "Null", "NULL") else bare
    spelt = "null" if spelt == "none" else spelt
    try:
        kind = _kind_of(decoded(spelt))
    except Malformed:
        kind = "string"
    # a text in quotes means the quotes; what fits nothing is left as it was written, for the client to complain
    is_value = kind != "string" and (kind in kinds or "string" not in kinds)
    is_value |= kind == "integer" and "number" in kinds
    return spelt if is_value else json.dumps(text, ensure_ascii=False)


def _kind_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case _:
            return "array" if isinstance(value, list) else "object"


FORMAT = ToolFormat(
    name="qwen3_coder",
    read=_read,
    marks=(_OPEN, _CLOSE),
    is_taught_by=lambda template: _FUNCTION in template and _PARAMETER in template,
)
