"""response_format: what ends by itself has the form."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pydantic

from conformance.checks.streams import content_of
from conformance.registry import Skip, check, check_each
from conformance.target import MESSAGES, Target

SCHEMAS: dict[str, object] = {
    "an object": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                  "required": ["a"], "additionalProperties": False},
    "an enum": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"],
                "additionalProperties": False},
    "a list": {
        "type": "object",
        "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
        "required": ["flags"],
        "additionalProperties": False,
    },
    "a pattern": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                  "required": ["zip"], "additionalProperties": False},
    "a choice of two": {"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
                                   "additionalProperties": False},
                                  {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"],
                                   "additionalProperties": False}]},
    "definitions": {"$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}}, "required": ["x", "y"],
                    "additionalProperties": False},
}  # fmt: skip


def form_of(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@check_each(SCHEMAS)
def an_answer_of_a_schema(target: Target, row: object) -> None:
    """json_schema, whole and streamed:"""
    fields = {"response_format": form_of(row), "max_completion_tokens": 200}
    choice = target.post_chat(**fields).json["choices"][0]
    if choice["finish_reason"] == "length":
        raise Skip("the model goes on with white space until its limit")
    assert choice["finish_reason"] == "stop", choice
    jsonschema.validate(json.loads(choice["message"]["content"]), row)
    assert content_of(target.post_chat(stream=True, **fields).events) == choice["message"]["content"]


@check
def an_object(target: Target) -> None:
    """json_object: an answer that ends by itself is an object."""
    fields = {"response_format": {"type": "json_object"}, "max_completion_tokens": 300}
    choice = target.post_chat(**fields).json["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].lstrip().startswith("{")


@check
def a_text(target: Target) -> None:
    """response_format text changes nothing."""
    plain = target.post_chat().json["choices"][0]["message"]
    assert target.post_chat(response_format={"type": "text"}).json["choices"][0]["message"] == plain


@check
def a_class(target: Target) -> None:
    """client.chat.completions.parse with a class of pydantic."""

    class Answer(pydantic.BaseModel):
        number: int = pydantic.Field(ge=0, le=99)

    fields = {"model": target.model, "messages": MESSAGES, "max_completion_tokens": 200, "temperature": 0}
    parsed = target.client.chat.completions.parse(**fields, response_format=Answer).choices[0].message.parsed
    assert isinstance(parsed, Answer)


@check
def a_schema_that_cannot_be_kept(target: Target) -> None:
    """400 that names the keyword which is not supported."""
    reply = target.post_chat(response_format=form_of({"type": "array", "uniqueItems": True}))
    assert reply.status == 400, reply.status
    assert "uniqueItems" in reply.error["message"], reply.error


@check
def a_schema_that_is_none(target: Target) -> None:
    """400 for a schema that is no JSON schema."""
    reply = target.post_chat(response_format=form_of({"type": "strange"}))
    assert reply.status == 400, reply.status
    assert reply.error["type"] == "invalid_request_error"
