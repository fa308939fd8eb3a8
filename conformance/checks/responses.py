"""/v1/responses through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai

from conformance.checks.forms import SCHEMAS
from conformance.checks.tools import CITY
from conformance.registry import Skip, check
from conformance.target import Target

TOOL = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}


def ask(target: Target, **fields: Any) -> Any:
    asked = {"model": target.model, "input": "What is seven plus five?", "max_output_tokens": 16, "temperature": 0}
    try:
        return target.client.responses.create(**{**asked, **fields})
    except openai.NotFoundError as error:
        if "model" in fields:
            raise
        raise Skip("the server has no /v1/responses") from error


@check
def a_response(target: Target) -> None:
    """object, status, output with a message, and usage that adds up."""
    answer = ask(target)
    assert answer.object == "response"
    assert answer.id.startswith("resp_")
    assert answer.status in {"completed", "incomplete"}
    assert answer.output[0].type == "message"
    assert answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


@check
def a_stream(target: Target) -> None:
    """Events are numbered, and the deltas joined are the text of the last one."""
    events = list(ask(target, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type in {"response.completed", "response.incomplete"}
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == ask(target).output_text


@check
def a_call(target: Target) -> None:
    """A function_call, and its output is taken."""
    answer = ask(target, tools=[TOOL], tool_choice="required", max_output_tokens=100)
    call = next(item for item in answer.output if item.type == "function_call")
    assert set(json.loads(call.arguments)) == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    question = {"role": "user", "content": "What is the weather?"}
    assert ask(target, input=[question, call.model_dump(), result], tools=[TOOL]).output


@check
def a_form(target: Target) -> None:
    """text.format json_schema: the text has the form."""
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMAS["an enum"]}
    answer = ask(target, text={"format": form}, max_output_tokens=200)
    assert json.loads(answer.output_text)["colour"] in {"red", "green"}


@check
def a_turn_after_another(target: Target) -> None:
    """previous_response_id: the earlier turn is part of the prompt; it can be retrieved and deleted."""
    first = ask(target, store=True)
    second = ask(target, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert target.client.responses.retrieve(first.id).output_text == first.output_text
    target.client.responses.delete(first.id)
    try:
        target.client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("it is still there")


@check
def a_mistake(target: Target) -> None:
    """400 with the name of the field."""
    try:
        ask(target, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error.param
    else:
        raise AssertionError("no error")
