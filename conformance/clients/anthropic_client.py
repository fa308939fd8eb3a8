"""The official client of Anthropic's API, on /v1/messages: messages, streams, tools, counts, errors."""

import anthropic
from reporting import KEY, MODEL, SCHEMA, URL, run

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY or "none", max_retries=0)
MESSAGES = [{"role": "user", "content": "What is seven plus five?"}]
TOOLS = [{"name": "get_weather", "description": "Get the weather of a city.", "input_schema": SCHEMA}]


# its newest versions have no argument for it
GREEDY = {"extra_body": {"temperature": 0}}


def ask(**fields):
    return client.messages.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 12, **GREEDY, **fields})


def a_message():
    answer = ask(system="Be short.")
    assert answer.type == "message"
    assert answer.content[0].type == "text"
    assert answer.stop_reason in {"end_turn", "max_tokens"}
    assert answer.usage.output_tokens <= 12
    assert answer._request_id


def a_stream():
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=12, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ask().content[0].text


def events_of_a_stream():
    kinds = [event.type for event in ask(stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def a_use_of_a_tool():
    answer = ask(tools=TOOLS, tool_choice={"type": "any"}, max_tokens=100)
    used = next(block for block in answer.content if block.type == "tool_use")
    assert used.name == "get_weather"
    assert set(used.input) == {"city"}
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    messages = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert ask(messages=messages, tools=TOOLS).content


def a_streamed_use_of_a_tool():
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "tools": TOOLS, **GREEDY}
    with client.messages.stream(**fields, tool_choice={"type": "tool", "name": "get_weather"}) as stream:
        final = stream.get_final_message()
    assert next(block for block in final.content if block.type == "tool_use").input.keys() == {"city"}


def stop_sequences():
    text = ask(max_tokens=40).content[0].text
    stopped = ask(max_tokens=40, stop_sequences=[text[4:6]])
    assert stopped.content[0].text == text[: text.index(text[4:6])]
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == text[4:6]


def a_count():
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    usage = ask(max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def errors():
    for fields, kind in (
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"model": "x"}, anthropic.NotFoundError),
    ):
        try:
            ask(**fields)
        except kind as error:
            assert error.body["type"] == "error"
            assert error.body["error"]["type"] in {"invalid_request_error", "not_found_error"}
        else:
            raise AssertionError("no error")


def a_wrong_key():
    if not KEY:
        return
    try:
        client.with_options(api_key="wrong").messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error"
    else:
        raise AssertionError("no error")


STREAMS = (a_stream, events_of_a_stream, a_streamed_use_of_a_tool)
raise SystemExit(run(a_message, *STREAMS, a_use_of_a_tool, stop_sequences, a_count, errors, a_wrong_key))
