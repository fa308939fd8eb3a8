"""Forms of answers that cannot be followed: JSON schemas, and the fields around them."""

from __future__ import annotations

from typing import Any

from .case import Case, chat, completion, shown


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_SCHEMAS: dict[str, Any] = {
    "unknown type": {"type": "thing"}, "type null": {"type": None}, "type a number": {"type": 1},
    "type an object": {"type": {}}, "a list with an unknown type": {"type": ["string", "thing"]},
    "types that are numbers": {"type": [1, 2]},
    "properties a list": {"type": "object", "properties": []},
    "properties a text": {"type": "object", "properties": "a"},
    "a property that is a number": _object(a=1), "a property that is a text": _object(a="string"),
    "a property that is null": _object(a=None), "required a text": {"type": "object", "required": "a"},
    "required numbers": {"type": "object", "required": [1]},
    "items a text": {"type": "array", "items": "string"}, "items a number": {"type": "array", "items": 5},
    "prefixItems an object": {"type": "array", "prefixItems": {"a": 1}},
    "minItems a text": {"type": "array", "items": {"type": "null"}, "minItems": "1"},
    "minItems below zero": {"type": "array", "items": {"type": "null"}, "minItems": -1},
    "minItems above maxItems": {"type": "array", "items": {"type": "null"}, "minItems": 5, "maxItems": 1},
    "minLength above maxLength": {"type": "string", "minLength": 5, "maxLength": 1},
    "minLength a text": {"type": "string", "minLength": "1"},
    "minLength below zero": {"type": "string", "minLength": -1},
    "maxLength a fraction": {"type": "string", "maxLength": 1.5},
    "minimum a text": {"type": "integer", "minimum": "1"},
    "minimum above maximum": {"type": "integer", "minimum": 5, "maximum": 1},
    "exclusive bounds that leave nothing": {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
    "multipleOf zero": {"type": "integer", "multipleOf": 0},
    "multipleOf a text": {"type": "integer", "multipleOf": "2"},
    "an empty enum": {"enum": []}, "enum a text": {"enum": "a"}, "enum an object": {"enum": {"a": 1}},
    "an empty anyOf": {"anyOf": []}, "anyOf an object": {"anyOf": {"type": "string"}},
    "anyOf with a text": {"anyOf": ["string"]}, "an empty oneOf": {"oneOf": []},
    "allOf that contradicts itself": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "allOf a text": {"allOf": "x"},
    "not": {"not": {"type": "string"}}, "if and then": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "a reference to nothing": {"$ref": "#/$defs/none"}, "a reference that is a number": {"$ref": 5},
    "a reference to itself": {"$ref": "#"},
    "two references in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a",
    },
    "a reference to a network": {"$ref": "http://127.0.0.1:1/x.json"},
    "a reference to a secure network": {"$ref": "https://example.com/schema.json"},
    "a reference to a file": {"$ref": "file:///etc/passwd"}, "a reference by ftp": {"$ref": "ftp://127.0.0.1/x"},
    "a property that refers to a network": _object(a={"$ref": "http://127.0.0.1:1/x.json"}),
    "a dynamic reference": {"$dynamicRef": "#a"},
    "a pattern that is none": {"type": "string", "pattern": "("},
    "a pattern of a number": {"type": "string", "pattern": 5},
    "a pattern that looks back": {"type": "string", "pattern": r"(a)\1"},
    "a pattern that looks ahead": {"type": "string", "pattern": "(?=a)b"},
    "a pattern of ten thousand brackets": {"type": "string", "pattern": "(" * 10_000 + ")" * 10_000},
    "patternProperties that are none": {"type": "object", "patternProperties": {"(": {"type": "string"}}},
    "65 levels": _nested(65), "400 levels": _nested(400),
    "a million choices": {"enum": [f"choice {number}" for number in range(40_000)]},
    "a schema of 300 KiB": {"type": "object", "description": "x" * 300_000},
    "an object that must be empty and is not": {"type": "object", "additionalProperties": False, "required": ["a"]},
    "a schema that is false": False, "a schema that is a list": [], "a schema that is a number": 5,
    "a schema that is null": None, "a schema that is a text": "object",
    "a keyword that nobody knows": {"type": "string", "contentMediaType": "image/png", "format": "no-such-format"},
}  # fmt: skip
_FORMATS: list[Any] = [
    {}, {"type": None}, {"type": ""}, {"type": "xml"}, {"type": 5}, {"type": "json_schema"}, {"type": ["json_object"]},
    {"type": "json_schema", "json_schema": None}, {"type": "json_schema", "json_schema": "x"},
    {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"name": "a"}},
    {"type": "json_schema", "json_schema": {"name": 5, "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"other": 1, "name": "a", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": "yes"}},
    {"type": "structural_tag"}, {"type": "structural_tag", "structures": 5}, {"type": "grammar"},
    {"type": "structural_tag", "structures": [{}], "triggers": ["<"]},
    {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": []},
]  # fmt: skip
_OUTPUTS: list[Any] = [
    {}, {"json": None}, {"json": ""}, {"json": "{"}, {"json": 5}, {"json_object": False}, {"json_object": "yes"},
    {"regex": ""}, {"regex": 5}, {"choice": []}, {"choice": 5}, {"choice": [1]}, {"choice": [""]}, {"grammar": ""},
    {"grammar": 5}, {"structural_tag": ""}, {"structural_tag": "{"}, {"json": {}, "regex": "a"},
    {"choice": ["a"], "grammar": "start: \"a\""}, {"unknown": 1}, {"regex": "a", "unknown": 1},
    {"json": {"type": "object"}, "whitespace_pattern": "("}, {"json": {"type": "object"}, "disable_any_whitespace": 5},
]  # fmt: skip


def _as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# what the library takes, and a server must survive
_HEAVY = {
    "multipleOf below zero": {"type": "integer", "multipleOf": -3},
    "a pattern that repeats a hundred million times": {"type": "string", "pattern": "(a{10000}){10000}"},
    "a list of a million": {"type": "array", "items": {"type": "null"}, "minItems": 1_000_000},
    "a text of a billion letters": {"type": "string", "minLength": 10**9},
    "a thousand optional properties": {
        "type": "object",
        "properties": {f"p{n}": {"type": "null"} for n in range(1000)},
    },
}

CASES: list[Case] = [
    *(
        chat(f"heavy schema: {name}", response_format=_as_format(schema), allowed=(200, 400))
        for name, schema in _HEAVY.items()
    ),
    *(chat(f"schema: {name}", response_format=_as_format(schema)) for name, schema in _SCHEMAS.items()),
    *(chat(f"response_format={shown(value)}", response_format=value) for value in _FORMATS),
    *(completion(f"structured_outputs={shown(value)}", structured_outputs=value) for value in _OUTPUTS),
    *(
        completion(f"guided_json={shown(value)}", guided_json=value)
        for value in ("", "{", "[]", False, {"type": "thing"})
    ),
    completion("two forms", guided_regex="a", guided_choice=["a"]),
    chat("a form twice", response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
]
