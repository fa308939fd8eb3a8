"""/v1/messages through the official client, on a fake engine: whole and streamed answers, and what is refused."""

import anthropic
import httpx2 as httpx
import pytest

from quire.renderer.output_formats import OutputFormats
from quire.renderer.reasoning_parsers.tags import between_tags

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
BOTH = f"<think>\nHm. 😀\n</think>\n\nI look it up.\n{CALL}\n{CALL}"
MESSAGE = {"role": "user", "content": "Hi"}
ASK = {"model": "byte-model", "max_tokens": 500, "messages": [MESSAGE]}


def set_up(server, answer: str = "") -> None:
    server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes", reasoning="think")
    if answer:
        server.fake.reply_to = lambda request, index: answer


def client_of(server, **options) -> anthropic.AsyncAnthropic:
    """Strict: an answer that does not have the form of its type is an error."""
    fixed = {"base_url": "http://quire.test", "http_client": server.http, "max_retries": 0}
    return anthropic.AsyncAnthropic(_strict_response_validation=True, **fixed, **{"api_key": "none", **options})


def prompt_of(server) -> str:
    return server.engine.renderer.decode(server.requests()[-1].prompt_token_ids, skip_special_tokens=False)


async def streamed(client, **fields) -> list:
    return [event async for event in await client.messages.create(stream=True, **fields)]


@pytest.fixture
def asked(run, served):
    """Runs a test with (server, client)."""

    def start(test, **options):
        async def main():
            async with served(max_model_len=2048, **options) as server:
                set_up(server)
                return await test(server, client_of(server))

        return run(main())

    return start


def test_a_text(asked):
    async def test(server, client):
        message = await client.messages.create(system="Be kind.", **ASK)
        assert prompt_of(server) == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
        num_prompt = len(server.requests()[0].prompt_token_ids)
        (text,) = server.texts(1, num_prompt)
        (block,) = message.content
        assert (block.type, block.text) == ("text", text)
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.role, message.model) == ("assistant", "byte-model")
        usage = message.usage
        # what was cached is counted apart
        assert usage.cache_read_input_tokens == num_prompt // 2
        assert usage.input_tokens + usage.cache_read_input_tokens == num_prompt
        assert usage.output_tokens == len(text.encode()) + 1
        assert message._request_id.startswith("req_")

    asked(test)


@pytest.mark.parametrize("answer", ["Hello. 😀", BOTH, CALL, "<think>\nHm.\n</think>\n\nYes.", ""])
def test_a_stream_says_what_the_whole_says(asked, answer):
    async def test(server, client):
        server.fake.reply_to = lambda request, index: answer
        fields = {**ASK, "tools": [WEATHER]}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            raw = [event async for event in stream]
            final = await stream.get_final_message()
        assert shown(final) == shown(whole)
        kinds = [block.type for block in whole.content]
        expected = {BOTH: ["thinking", "text", "tool_use", "tool_use"], CALL: ["tool_use"], "": []}
        expected["<think>\nHm.\n</think>\n\nYes."] = ["thinking", "text"]
        assert kinds == expected.get(answer, ["text"])
        assert whole.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")
        assert raw[0].type == "message_start"
        assert raw[0].message.usage.input_tokens == whole.usage.input_tokens
        assert raw[-1].type == "message_stop"

    asked(test)


def shown(message) -> dict:
    """What two messages to one request have in common."""
    found = message.to_dict()
    del found["id"]
    # the client's own stream puts it there
    found.pop("stop_details", None)
    ids = [block.pop("id") for block in found["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)
    for block in found["content"]:
        block.pop("parsed_output", None)
    return found


def test_blocks_come_one_after_the_other(asked):
    async def test(server, client):
        set_up(server, BOTH)
        events = await streamed(client, tools=[WEATHER], **ASK)
        order = []
        for event in events:
            if event.type == "content_block_start":
                assert event.index == len(order)
                assert event.content_block.type in ("text", "thinking", "tool_use")
                order.append(event.content_block.type)
            elif event.type in ("content_block_delta", "content_block_stop"):
                assert event.index == len(order) - 1
        assert order == ["thinking", "text", "tool_use", "tool_use"]
        kinds = {event.delta.type for event in events if event.type == "content_block_delta"}
        assert kinds == {"text_delta", "thinking_delta", "signature_delta", "input_json_delta"}
        assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]

    asked(test)


def test_a_tool_is_used_and_answered(asked):
    async def test(server, client):
        set_up(server, BOTH)
        first = await client.messages.create(tools=[WEATHER], **ASK)
        use = first.content[2]
        assert (use.name, use.input) == ("weather", {"city": "Zürich"})
        set_up(server, "Sunny.")
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]},
            {"type": "tool_result", "tool_use_id": first.content[3].id, "content": "closed", "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
        turns = [MESSAGE, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await client.messages.create(**{**ASK, "messages": turns}, tools=[WEATHER])
        prompt = prompt_of(server)
        assert prompt.endswith(
            "<|tool|>sun<|end|><|tool|>Error: closed<|end|><|user|>Go on.<|end|>[1 tools]<|assistant|>"
        )
        assert "<|assistant|>I look it up.[" in prompt
        assert prompt.count('"name": "weather"') == 2

    asked(test)


@pytest.mark.parametrize(
    ("choice", "num_shown", "is_bound"),
    [
        ({"type": "auto"}, 1, False),
        ({"type": "none"}, 0, False),
        ({"type": "any"}, 1, True),
        ({"type": "tool", "name": "weather"}, 1, True),
    ],
)
def test_tool_choice(asked, choice, num_shown, is_bound):
    async def test(server, client):
        await client.messages.create(tools=[WEATHER], tool_choice=choice, **ASK)
        assert ("[1 tools]" in prompt_of(server)) == bool(num_shown)
        assert (server.requests()[0].sampling.structured_outputs is not None) == is_bound

    asked(test)


def test_further_calls_are_dropped_if_asked(asked):
    async def test(server, client):
        set_up(server, BOTH)
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = await client.messages.create(tools=[WEATHER], tool_choice=choice, **ASK)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]

    asked(test)


def test_a_call_that_is_cut_says_so(asked):
    async def test(server, client):
        set_up(server, CALL)
        fields = {**ASK, "max_tokens": CALL.index("rich")}
        message = await client.messages.create(tools=[WEATHER], **fields)
        assert message.stop_reason == "max_tokens"
        assert (message.content[0].type, message.content[0].input) == ("tool_use", {})

    asked(test)


def test_ends(asked):
    async def test(server, client):
        message = await client.messages.create(**{**ASK, "max_tokens": 4})
        assert (message.content[0].text, message.stop_reason) == ("Answ", "max_tokens")
        message = await client.messages.create(stop_sequences=["to"], **ASK)
        assert (message.content[0].text, message.stop_reason) == ("Answer 0 ", "stop_sequence")
        assert message.stop_sequence == "to"
        # more than the model has room for is asked for as a matter of course
        server.fake.reply_to = lambda request, index: "x" * 5000
        message = await client.messages.create(**{**ASK, "max_tokens": 10_000})
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.output_tokens + len(server.requests()[-1].prompt_token_ids) == 2048

    asked(test)


def test_an_answer_that_was_begun_is_continued(asked):
    async def test(server, client):
        turns = [MESSAGE, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
        await client.messages.create(**{**ASK, "messages": turns})
        assert prompt_of(server) == "<|user|>Hi<|end|><|assistant|>It is"

    asked(test)


def test_a_budget_of_thoughts_is_enforced_where_it_can_be(asked):
    """The specials of the fake tokenizer stand in for marks; those of Qwen are not one token each in it."""
    enabled = {"type": "enabled", "budget_tokens": 1024}

    async def test(server, client):
        renderer = server.engine.renderer
        await client.messages.create(thinking=enabled, **ASK)
        renderer.output_formats = OutputFormats(reasoning=between_tags("marks", "<|user|>", "<|end|>"))
        for thinking in (enabled, {"type": "adaptive"}, {"type": "disabled"}, {**enabled, "budget_tokens": 2**40}):
            await client.messages.create(thinking=thinking, **ASK)
        await client.messages.create(thinking=enabled, extra_body={"thinking_token_budget": 7}, **ASK)
        return [request.sampling.thinking_token_budget for request in server.requests()]

    assert asked(test) == [None, 1024, None, None, 2**31 - 1, 7]


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_switched_in_the_template(asked, thinking, expected):
    async def test(server, client):
        seen = []
        render = server.engine.renderer.render_prompt
        server.engine.renderer.render_prompt = lambda chat, **options: (seen.append(options), render(chat, **options))[
            1
        ]
        await client.messages.create(**ASK, **({} if thinking is None else {"thinking": thinking}))
        # two names of one switch
        assert seen[0]["template_kwargs"] == {"enable_thinking": expected, "thinking": expected}

    asked(test)


def test_thoughts_may_be_left_out(asked):
    async def test(server, client):
        set_up(server, BOTH)
        thinking = {"type": "adaptive", "display": "omitted"}
        message = await client.messages.create(tools=[WEATHER], thinking=thinking, **ASK)
        assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")
        assert message.content[1].text == "I look it up."

    asked(test)


def test_thoughts_go_back(asked):
    async def test(server, client):
        seen = []
        render = server.engine.renderer.render_prompt
        server.engine.renderer.render_prompt = lambda chat, **options: (seen.append(chat), render(chat, **options))[1]
        blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
        turns = [MESSAGE, {"role": "assistant", "content": blocks}, MESSAGE]
        await client.messages.create(**{**ASK, "messages": turns})
        assert seen[0][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}

    asked(test)


def test_a_form(asked):
    async def test(server, client):
        server.fake.reply_to = lambda request, index: '{"a": 1}'
        form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        message = await client.messages.create(output_config={"format": form}, **ASK)
        assert message.content[0].text == '{"a": 1}'
        assert '"a"' in server.requests()[0].sampling.structured_outputs.json

    asked(test)


def test_tokens_are_counted(asked):
    async def test(server, client):
        fields = {"model": "byte-model", "messages": [MESSAGE], "system": "Be kind.", "tools": [WEATHER]}
        counted = await client.messages.count_tokens(**fields)
        assert server.requests() == []
        await client.messages.create(max_tokens=5, **fields)
        assert counted.input_tokens == len(server.requests()[0].prompt_token_ids)
        # whoever counts wants to know how much too long it is
        for size in (2044, 2045, 20_000):
            counted = await client.messages.count_tokens(
                model="byte-model", messages=[{"role": "user", "content": "x" * size}]
            )
            assert counted.input_tokens == size + 3
        with pytest.raises(anthropic.BadRequestError, match="However, 30028 characters were given in your messages"):
            await client.messages.count_tokens(model="byte-model", messages=[{"role": "user", "content": "x" * 30_000}])

    asked(test)


def test_a_system_message_may_come_later(asked):
    async def test(server, client):
        turns = [MESSAGE, {"role": "assistant", "content": "Yes."}, {"role": "system", "content": "Be short."}, MESSAGE]
        blocks = [
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind"},
        ]
        await client.messages.create(**{**ASK, "messages": turns}, system=blocks)
        assert prompt_of(server).startswith("<|system|>Be\nkind<|end|><|user|>Hi<|end|>")
        assert "<|system|>Be short.<|end|>" in prompt_of(server)

    asked(test)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"name": ["x"], "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": ["x"]}}, "tool_choice"),
        ({"max_token": 5}, "max_token"),
        ({"stop": ["x"]}, "stop"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [MESSAGE, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "messages[1].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(asked, fields, named):
    async def test(server, client):
        body = {name: value for name, value in {**ASK, **fields}.items() if value is not None}
        answer = await server.post("/v1/messages", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert named in error["message"]
        assert error.keys() == {"type", "message"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert server.requests() == []

    asked(test)


def test_what_is_too_long_is_refused(asked):
    async def test(server, client):
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is 2048 tokens"):
            await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 3000}]})

    asked(test)


def test_every_error_of_this_api_has_its_form(run, served):
    async def main():
        async with served(api_keys=["secret"]) as server:
            client = client_of(server, api_key="wrong")
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**ASK)
            assert caught.value.body["error"]["type"] == "authentication_error"
            assert caught.value.request_id.startswith("req_")
            client = client_of(server, api_key="secret")
            assert (await client.messages.create(**ASK)).content
            for path, status, kind in (("/v1/messages/none", 404, "not_found_error"), ("/v1/messages", 405, None)):
                answer = await server.http.get(path, headers={"x-api-key": "secret"})
                assert answer.status_code == status
                assert answer.json()["error"]["type"] == (kind or "invalid_request_error")
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.create(**{**ASK, "model": "none"})
            assert caught.value.body["error"]["type"] == "not_found_error"
            # the others keep theirs
            answer = await server.http.get("/v1/models")
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
            assert "request-id" not in answer.headers

    run(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "secret")], 200),
        ([("authorization", "Bearer secret")], 200),
        ([("authorization", "Bearer secret"), ("x-api-key", "secret")], 200),
        ([("authorization", "Bearer secret"), ("x-api-key", "wrong")], 401),
        ([("authorization", "Bearer wrong"), ("x-api-key", "secret")], 401),
        ([("x-api-key", "secret"), ("x-api-key", "secret")], 401),
        ([("x-api-key", "Bearer secret")], 401),
        ([("authorization", "secret")], 401),
        ([("x-api-key", "")], 401),
        ([], 401),
    ],
)
def test_a_key_in_either_header(run, served, headers, status):
    async def main():
        async with served(api_keys=["secret"]) as server:
            answer = await server.http.get("/v1/models", headers=headers)
            assert answer.status_code == status

    run(main())


def test_a_failure_in_a_stream_is_an_event(asked):
    async def test(server, client):
        server.fake.failures[0] = "broken"
        with pytest.raises(anthropic.InternalServerError):
            await streamed(client, **ASK)
        server.fake.failures.clear()
        server.fake.failures[3] = "broken"
        answer = await server.post("/v1/messages", {**ASK, "stream": True})
        assert answer.status_code == 200
        *_, last, empty = answer.text.split("\n\n")
        assert empty == ""
        assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            await streamed(client, **ASK)

    asked(test)


def test_a_server_that_is_not_ready_is_overloaded(run):
    from quire.interfaces.gateway import create_app

    async def main():
        transport = httpx.ASGITransport(app=create_app(), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire.test") as http:
            answer = await http.post("/v1/messages", json=ASK)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
            assert answer.headers["retry-after"]

    run(main())
