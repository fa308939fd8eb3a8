"""The fields that ask for a form of the answer, OpenAI's and vLLM's, as StructuredOutputsParams.

A mistake in a form is found by those parameters, or later by the checking process; both call the field
`structured_outputs`. `form_names` has the name under which the client gave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError, suggestion
from quire.interfaces.server.openai.requests import GenerationFields
from quire.interfaces.server.wire.errors import invalid, renamed
from quire.structured_outputs_params import StructuredOutputsParams

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_KEYS = ("name", "schema", "strict", "description")
_TEXT = {"type": "text"}


def structured_outputs_of(fields: GenerationFields) -> StructuredOutputsParams | None:
    """The form that is asked for, if one is."""
    names = _given(fields)
    if not names:
        return None
    if len(names) > 1:
        raise invalid(f"{names[1]}: not together with {names[0]}; an answer has one form. Give one of them.", names[1])
    [name] = names
    value = getattr(fields, name)
    try:
        return StructuredOutputsParams(**_parameters(name, value))
    except RequestError as error:
        raise renamed(error, form_names(fields)) from None


def form_names(fields: GenerationFields) -> Mapping[str, str]:
    """For `renamed`."""
    names = _given(fields)
    return {"structured_outputs": names[0]} if names else {}


def _given(fields: GenerationFields) -> list[str]:
    values = {name: getattr(fields, name) for name in FIELDS}
    return [name for name, value in values.items() if value is not None and value != _TEXT]


def _parameters(name: str, value: Any) -> dict[str, Any]:
    if name == "response_format":
        return _of_response_format(value)
    if name == "structured_outputs":
        return dict(value)
    return {name.removeprefix("guided_"): value}


def _of_response_format(value: dict[str, Any]) -> dict[str, Any]:
    match value.get("type"):
        case "json_object":
            _check_keys(value, ("type",), "response_format")
            return {"json_object": True}
        case "json_schema":
            _check_keys(value, ("type", "json_schema"), "response_format")
            return {"json": _schema_in(value.get("json_schema"))}
        case "structural_tag":
            return {"structural_tag": value}
        case other:
            raise invalid(f"response_format.type={other!r}: must be one of {', '.join(_FORMATS)}.", "response_format")


def _schema_in(value: Any) -> Any:
    """`strict` makes no difference: what comes out follows the schema in either case."""
    where = "response_format.json_schema"
    if not isinstance(value, dict) or not isinstance(value.get("schema"), dict):
        text = f'{where}: must be {{"name": text, "schema": a JSON schema, "strict": true or false}}.'
        raise invalid(text, "response_format")
    _check_keys(value, _SCHEMA_KEYS, where)
    if not isinstance(value.get("strict"), bool | None):
        raise invalid(f"{where}.strict={value['strict']!r}: must be true or false.", "response_format")
    if not isinstance(value.get("name"), str | None) or not isinstance(value.get("description"), str | None):
        raise invalid(f"{where}: name and description must be texts.", "response_format")
    return value["schema"]


def _check_keys(value: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise invalid(f"{where}.{name}: there is no such field.{suggestion(name, known)}", "response_format")
