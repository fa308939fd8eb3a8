"""What /openapi.json says of requests beyond their types: forms and bounds that the server checks where it reads them.

Each is as wide as the check, or wider: what this server takes must never be wrong by its own description.
"""

from __future__ import annotations

from typing import Any

from quire.interfaces.server.openai.rendering import EFFORTS
from quire.interfaces.server.openai.sampling import MAX_TEMPERATURE
from quire.renderer.chat_messages import MAX_MESSAGES, ROLES
from quire.sampling_params import BOUNDS, MAX_STOP_STRINGS

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}
_WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 1024}
_TOKEN: Schema = {"type": "integer", "minimum": 0}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [_TEXT_PART, {"type": "string"}]}}]
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["function"],
}
_MESSAGE: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT},
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
            },
            "required": ["role", "tool_calls"],
        },
    ]
}
_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _NAME, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


def _tagged(kind: str, **properties: Schema) -> Schema:
    """An object with a type; its other fields are required."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *properties],
    }


_JSON_SCHEMA: Schema = {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]}
_FORMAT: list[Schema] = [
    _tagged("text"),
    _tagged("json_object"),
    _tagged("json_schema", json_schema=_JSON_SCHEMA),
    _tagged("structural_tag"),
]
_NAMED: Schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# by the name of the field, for requests that sample
_FORMS: dict[str, Schema] = {
    "stop": {"anyOf": [_WORD, {"type": "array", "items": _WORD, "maxItems": MAX_STOP_STRINGS}, _NULL]},
    "logit_bias": {
        "anyOf": [
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "maxProperties": 1024,
            },
            _NULL,
        ]
    },
    "stop_token_ids": {"anyOf": [{"type": "array", "items": _TOKEN}, _NULL]},
    "allowed_token_ids": {"anyOf": [{"type": "array", "items": _TOKEN, "minItems": 1}, _NULL]},
    "bad_words": {"anyOf": [{"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 128}, _NULL]},
    "response_format": {"anyOf": [*_FORMAT, _NULL]},
    "reasoning_effort": {"anyOf": [{"enum": list(EFFORTS)}, _NULL]},
}
# and of a chat; other requests have other messages and tools under these names
_CHAT_FORMS: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
    "tools": {"anyOf": [{"type": "array", "items": _TOOL, "maxItems": 128}, _NULL]},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _tagged("function", function=_NAMED), _NULL]},
}
_RANGES = (*BOUNDS, ("temperature", 0.0, MAX_TEMPERATURE), ("max_completion_tokens", 1, 2**31 - 1))


def refine(name: str, schema: Schema) -> None:
    """Adds them to a request's schema, whose component has this name."""
    properties = schema.get("properties", {})
    if "temperature" not in properties:
        return
    for field, low, high in _RANGES:
        for kind in properties.get(field, {}).get("anyOf", ()):
            if kind.get("type") in ("integer", "number"):
                kind["minimum"], kind["maximum"] = low, high
    if name == "CompletionRequest":
        # with echo: the prompt alone
        properties["max_tokens"]["anyOf"][0]["minimum"] = 0
    for field, form in (_FORMS | (_CHAT_FORMS if name == "ChatRequest" else {})).items():
        if field in properties:
            kept = {key: properties[field][key] for key in ("description", "default") if key in properties[field]}
            properties[field] = {**kept, **form}
