"""A real server with the embedded model, driven by both official clients: turns, tools, forms, and a restart."""

import json

import anthropic
import openai
import pytest
from tests.support.server_process import ServerProcess

MODEL = "quire-embedded"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city."}
QUESTION = "What is the weather in Paris?"
RESULT = '{"sky": "sunny", "temperature": 21}'
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def serve(tmp_path):
    url = f"sqlite:///{tmp_path}/data/server.db"
    return ServerProcess(["-m", "quire.interfaces.cli", "serve", "--port", "0", "--storage-url", url])


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_both_clients(tmp_path):
    with serve(tmp_path) as server:
        url = server.wait_ready(300)
        with openai_client(url) as client:
            turns(client)
            calls(client)
            form(client)
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            messages(client)
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


@pytest.mark.nightly
def test_a_restart(tmp_path):
    """On a fake engine: test_stored_responses.py."""
    ask = {"model": MODEL, "max_output_tokens": 30}
    with serve(tmp_path) as server, openai_client(server.wait_ready(300)) as client:
        first = client.responses.create(input="What is seven plus five?", **ask)
        server.signal()
        assert server.wait() == 0
    with serve(tmp_path) as server, openai_client(server.wait_ready(300)) as client:
        assert client.responses.retrieve(first.id) == first
        again = client.responses.create(input="And two plus two?", previous_response_id=first.id, **ask)
        items = client.responses.input_items.list(again.id, order="asc").data
        assert [item.role for item in items] == ["user", "assistant", "user"]
        assert items[1].content[0].text == first.output_text
        server.signal()
        assert server.wait() == 0


def turns(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "temperature": 0, "instructions": "You are a helpful assistant. " * 4}
    first = client.responses.create(input="What is seven plus five?", **ask)
    assert "12" in first.output_text or "twelve" in first.output_text
    events = list(client.responses.create(input="Thank you.", previous_response_id=first.id, stream=True, **ask))
    second = events[-1].response
    assert second.status == "completed"
    assert second.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    # the turn before is computed no more
    usage = second.usage
    assert usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 > 0
    assert usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def calls(client: openai.OpenAI) -> None:
    tools = [{"type": "function", **WEATHER, "parameters": CITY, "strict": True}]
    ask = {"model": MODEL, "temperature": 0, "tools": tools}
    with client.responses.stream(input=QUESTION, **ask) as stream:
        response = stream.until_done().get_final_response()
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = client.responses.create(input=[result], previous_response_id=response.id, **ask)
    assert "sunny" in answer.output_text


def form(client: openai.OpenAI) -> None:
    text = {"format": {"type": "json_schema", "name": "age", "schema": AGE, "strict": True}}
    response = client.responses.create(model=MODEL, input="A person as JSON.", text=text, max_output_tokens=64)
    assert 1 <= json.loads(response.output_text)["age"] <= 9


def messages(client: anthropic.Anthropic) -> None:
    ask = {"model": MODEL, "max_tokens": 64, "tools": [{**WEATHER, "input_schema": CITY}]}
    turns = [{"role": "user", "content": QUESTION}]
    fixed = {"extra_body": {"temperature": 0}}
    counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=ask["tools"])
    with client.messages.stream(messages=turns, **ask, **fixed) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT}]}
    turns += [{"role": "assistant", "content": message.content}, result]
    answer = client.messages.create(messages=turns, **ask, **fixed)
    assert "sunny" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    assert answer.usage.cache_read_input_tokens > 0


@pytest.mark.nightly
def test_a_storage_that_cannot_be_opened_ends_the_start(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "server.db").write_text("no database " * 100)
    with serve(tmp_path) as server:
        assert server.wait() == 2
        assert "storage_url=" in server.output
        assert "Traceback" not in server.output, server.output
