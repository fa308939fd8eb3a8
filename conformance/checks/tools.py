"""Tools: calls, whole and streamed, and how a choice is enforced."""

from __future__ import annotations

import json
from typing import Any

from conformance.checks.streams import choices_of
from conformance.registry import Skip, check, check_each
from conformance.target import MESSAGES, Target

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
TIME = {"name": "get_time", "description": "Get the time of a city.", "parameters": CITY}
ASKS = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def asked(target: Target, **fields: Any) -> Any:
    reply = target.post_chat(**{"messages": ASKS, "tools": TOOLS, "max_completion_tokens": 100, **fields})
    assert reply.status == 200, reply.body[:300]
    return reply


def check_call(call: Any) -> None:
    assert call["type"] == "function"
    assert call["id"]
    assert call["function"]["name"] == "get_weather"
    assert isinstance(call["function"]["arguments"], str)
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


@check
def a_call(target: Target) -> None:
    """tool_choice auto: a call with id, type, name and arguments that are a text of JSON; finish tool_calls."""
    (choice,) = asked(target).json["choices"]
    if not choice["message"].get("tool_calls"):
        raise Skip("the model does not call by itself")
    check_call(choice["message"]["tool_calls"][0])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None


@check_each({"required": "required", "a named function": NAMED})
def an_enforced_call(target: Target, row: object) -> None:
    """A call where the model would not call: tool_choice"""
    (choice,) = asked(target, messages=MESSAGES, tool_choice=row).json["choices"]
    check_call(choice["message"]["tool_calls"][0])


@check
def no_call(target: Target) -> None:
    """tool_choice none: no call."""
    (choice,) = asked(target, tool_choice="none").json["choices"]
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] != "tool_calls"


@check
def the_named_function(target: Target) -> None:
    """Of two functions the named one is called."""
    two = [*TOOLS, {"type": "function", "function": TIME}]
    named = {"type": "function", "function": {"name": "get_time"}}
    (choice,) = asked(target, tools=two, tool_choice=named).json["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_time"]


@check
def at_most_one_call(target: Target) -> None:
    """parallel_tool_calls=false: at most one call."""
    (choice,) = asked(target, tool_choice="required", parallel_tool_calls=False).json["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


@check
def ids_of_calls(target: Target) -> None:
    """Two calls have two ids."""
    ids = {asked(target, tool_choice="required").json["choices"][0]["message"]["tool_calls"][0]["id"] for _ in "ab"}
    assert len(ids) == 2


def streamed_calls(target: Target) -> tuple[list[Any], list[Any]]:
    events = asked(target, tool_choice="required", parallel_tool_calls=False, stream=True).events
    choices = choices_of(events)
    return choices, [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]


@check
def the_first_delta_of_a_call(target: Target) -> None:
    """Its first delta has index, id, type and name, with empty arguments."""
    _, deltas = streamed_calls(target)
    assert deltas[0]["index"] == 0
    assert deltas[0]["id"]
    assert deltas[0]["type"] == "function"
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}, deltas[0]


@check
def further_deltas_of_a_call(target: Target) -> None:
    """The others have pieces of the arguments, which join to JSON; finish_reason is tool_calls."""
    choices, deltas = streamed_calls(target)
    assert all(set(delta) == {"index", "function"} for delta in deltas[1:]), deltas[1:]
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    assert set(json.loads(arguments)) == {"city"}
    assert choices[-1]["finish_reason"] in {"tool_calls", "stop"}


@check
def a_result_is_taken(target: Target) -> None:
    """The result of a call is answered."""
    message = target.chat(messages=ASKS, tools=TOOLS, tool_choice="required", max_completion_tokens=100)
    called = message.choices[0].message
    (call, *_) = called.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny"}'}
    rest = [{**result, "tool_call_id": other.id} for other in called.tool_calls[1:]]
    answer = target.chat(messages=[*ASKS, called, result, *rest], tools=TOOLS, max_completion_tokens=40)
    assert answer.choices[0].message


@check
def the_stream_reader_of_the_client(target: Target) -> None:
    """client.chat.completions.stream gathers the call."""
    fields = {"model": target.model, "messages": ASKS, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    with target.client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "get_weather"


@check_each({
    "a name with a space": {"name": "get weather"},
    "parameters that are a list": {"name": "f", "parameters": []},
})  # fmt: skip
def a_wrong_tool(target: Target, row: object) -> None:
    """400 for a tool with"""
    reply = target.post_chat(tools=[{"type": "function", "function": row}])
    assert reply.status == 400, reply.status
    assert reply.error["param"].startswith("tools[0]"), reply.error


@check
def a_choice_of_a_missing_tool(target: Target) -> None:
    """400 for a tool_choice that is none of the tools."""
    named = {"type": "function", "function": {"name": "other"}}
    reply = target.post_chat(tools=TOOLS, tool_choice=named)
    assert reply.status == 400, reply.status
    assert reply.error["param"] == "tool_choice", reply.error
