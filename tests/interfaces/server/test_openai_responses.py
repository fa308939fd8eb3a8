"""/v1/responses through the official client, on a fake engine: what comes back, what is kept, and what is refused."""

import json

import httpx2 as httpx
import openai
import pytest

from quire.renderer.output_formats import OutputFormats

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see. 😀\n</think>\n\nIt is sunny."
BOTH = f"<think>\nHm.\n</think>\n\nI look it up.\n{CALL}\n{CALL}"


def set_up(server, answer: str = "") -> None:
    server.engine.renderer.output_formats = OutputFormats.choose((), tool="hermes", reasoning="think")
    if answer:
        server.fake.reply_to = lambda request, index: answer


def client_of(server, **options) -> openai.AsyncOpenAI:
    """Strict: an answer that does not have the form of its type is an error."""
    return openai.AsyncOpenAI(
        base_url="http://quire.test/v1",
        api_key="none",
        http_client=server.http,
        max_retries=0,
        _strict_response_validation=True,
        **options,
    )


def prompt_of(server, number: int = -1) -> str:
    return server.engine.renderer.decode(server.requests()[number].prompt_token_ids, skip_special_tokens=False)


async def streamed(client, **fields) -> list:
    return [event async for event in await client.responses.create(stream=True, **fields)]


@pytest.fixture
def asked(run, served):
    """Runs a test with (server, client)."""

    def start(test, **options):
        async def main():
            async with served(max_model_len=4096, **options) as server:
                set_up(server)
                return await test(server, client_of(server))

        return run(main())

    return start


def test_a_text(asked):
    async def test(server, client):
        response = await client.responses.create(input="Hi", instructions="Be kind.", max_output_tokens=200)
        assert prompt_of(server) == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
        num_prompt = len(server.requests()[0].prompt_token_ids)
        (text,) = server.texts(1, num_prompt)
        assert response.output_text == text
        assert response.status == "completed"
        assert response.completed_at >= response.created_at
        assert (response.model, response.error, response.incomplete_details) == ("byte-model", None, None)
        (message,) = response.output
        assert (message.type, message.status, message.role) == ("message", "completed", "assistant")
        usage = response.usage
        assert usage.input_tokens == num_prompt
        assert usage.input_tokens_details.cached_tokens == num_prompt // 2
        assert usage.output_tokens == len(text.encode()) + 1
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens

    asked(test)


def test_a_cut_text_is_incomplete(asked):
    async def test(server, client):
        response = await client.responses.create(input="Hi", max_output_tokens=4)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
        assert response.output_text == "Answ"
        events = await streamed(client, input="Hi", max_output_tokens=4)
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == "Answ"

    asked(test)


@pytest.mark.parametrize("answer", ["Hello. 😀", THOUGHT, CALL, BOTH, ""])
def test_a_stream_says_what_the_whole_says(asked, answer):
    async def test(server, client):
        server.fake.reply_to = lambda request, index: answer
        fields = {"input": "Hi", "tools": [WEATHER]}
        whole = await client.responses.create(**fields)
        events = await streamed(client, **fields)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        last = events[-1].response
        assert without_ids(last) == without_ids(whole)
        assert rebuilt(events) == [item.to_dict() for item in last.output]
        kinds = [item.type for item in whole.output]
        expected = {"": ["message"], CALL: ["function_call"], THOUGHT: ["reasoning", "message"]}
        expected[BOTH] = ["reasoning", "message", "function_call", "function_call"]
        assert kinds == expected.get(answer, ["message"])
        # with the line breaks around it
        num_thought = {THOUGHT: len("\nLet me see. 😀\n".encode()), BOTH: len("\nHm.\n")}.get(answer, 0)
        assert whole.usage.output_tokens_details.reasoning_tokens == num_thought

    asked(test)


def test_lengths_can_be_hidden(asked):
    async def test(server, client):
        server.fake.reply_to = lambda request, index: "a 😀 \n" * 5
        options = {"include_obfuscation": True}
        events = await streamed(client, input="Hi", stream_options=options)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert len({len(event.delta) for event in deltas}) > 1
        for event in deltas:
            size = len(json.dumps(event.delta, ensure_ascii=False).encode()) + len(str(event.sequence_number))
            assert (size + len(',"logprobs":[]') + len(event.obfuscation)) % 256 == 0
        plain = await streamed(client, input="Hi")
        assert not any("obfuscation" in event.to_dict() for event in plain)

    asked(test)


def without_ids(response) -> dict:
    """What two responses to one request have in common."""
    found = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        del found[name]
    for item in found["output"]:
        assert len(item.pop("id")) > 10
        item.pop("call_id", None)
    return found


def rebuilt(events) -> list[dict]:
    """The output, put together from the events alone, which must come in their order."""
    output: list[dict] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(output)
                assert event.item.status == "in_progress"
                output.append(event.item.to_dict())
            case "response.content_part.added":
                assert event.content_index == len(output[-1]["content"]) == 0
                assert event.part.text == ""
                output[-1]["content"].append(event.part.to_dict())
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event.item_id == output[-1]["id"]
                output[-1]["content"][-1]["text"] += event.delta
            case "response.function_call_arguments.delta":
                assert event.item_id == output[-1]["id"]
                output[-1]["arguments"] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == output[-1]["content"][-1]["text"]
            case "response.function_call_arguments.done":
                assert event.arguments == output[-1]["arguments"]
            case "response.content_part.done":
                assert event.part.to_dict() == output[-1]["content"][-1]
            case "response.output_item.done":
                assert event.item.status == "completed"
                assert event.item.to_dict() == {**output[-1], "status": "completed"}
                output[-1]["status"] = "completed"
    assert all(item["status"] == "completed" for item in output)
    return output


def test_the_clients_own_stream(asked):
    async def test(server, client):
        set_up(server, BOTH)
        async with client.responses.stream(model="byte-model", input="Hi", tools=[WEATHER]) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        assert final.output[2].parsed_arguments == {"city": "Zürich"}
        assert final.output[0].content[0].text == "Hm."

    asked(test)


def test_a_function_is_called_and_answered(asked):
    async def test(server, client):
        set_up(server, BOTH)
        first = await client.responses.create(input="Weather?", tools=[WEATHER], parallel_tool_calls=False)
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Zürich"})
        assert first.tools[0].name == "weather"
        set_up(server, "Sunny.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        # carried by the client
        items = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), result]
        await client.responses.create(input=items, tools=[WEATHER], store=False)
        carried = prompt_of(server)
        # and by the server
        second = await client.responses.create(input=[result], previous_response_id=first.id, tools=[WEATHER])
        assert prompt_of(server) == carried
        assert "<|tool|>sun<|end|>" in carried
        assert "I look it up." in carried
        assert carried.count('"name": "weather"') == 1
        assert (second.output_text, second.previous_response_id) == ("Sunny.", first.id)

    asked(test)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", []),
        ("auto", ["weather", "f"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, ["f"]),
    ],
)
def test_tool_choice(asked, choice, names):
    async def test(server, client):
        seen = []
        render = server.engine.renderer.render_prompt
        server.engine.renderer.render_prompt = lambda chat, **options: (seen.append(options), render(chat, **options))[
            1
        ]
        tools = [WEATHER, {"type": "function", "name": "f", "parameters": {}, "strict": False}]
        response = await client.responses.create(input="Hi", tools=tools, tool_choice=choice)
        assert [tool["function"]["name"] for tool in seen[-1]["tools"] or ()] == names
        shown = response.tool_choice
        assert (shown if isinstance(shown, str) else shown.to_dict()) == choice

    asked(test)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_must_be_made_is_bound_to_its_form(asked, choice):
    async def test(server, client):
        await client.responses.create(input="Hi", tools=[WEATHER], tool_choice=choice)
        assert server.requests()[0].sampling.structured_outputs is not None

    asked(test)


def test_a_form(asked):
    async def test(server, client):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
        server.fake.reply_to = lambda request, index: '{"a": 1}'
        response = await client.responses.create(input="Hi", text={"format": form})
        assert server.requests()[0].sampling.structured_outputs.json == json.dumps(schema)
        assert response.text.format.to_dict() == form
        await client.responses.create(input="Hi", text={"format": {"type": "json_object"}})
        assert server.requests()[1].sampling.structured_outputs.json_object
        await client.responses.create(input="Hi", text={"format": {"type": "text"}, "verbosity": "low"})
        assert server.requests()[2].sampling.structured_outputs is None
        with pytest.raises(openai.BadRequestError, match=r"text\.format") as caught:
            await client.responses.create(input="Hi", text={"format": {"type": "xml"}})
        assert caught.value.param == "text.format"

    asked(test)


def test_log_probabilities(asked):
    async def test(server, client):
        fields = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole = await client.responses.create(**fields)
        logprobs = whole.output[0].content[0].logprobs
        assert (
            b"".join(bytes(one.bytes) for one in logprobs)[: len(whole.output_text.encode())].decode()
            == whole.output_text
        )
        assert {len(one.top_logprobs) for one in logprobs} == {2}
        events = await streamed(client, **fields)
        deltas = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert [one.token for one in deltas] == [one.token for one in logprobs]
        by_type = {event.type: event for event in events}
        repeated = [
            by_type["response.output_text.done"].logprobs,
            by_type["response.content_part.done"].part.logprobs,
            by_type["response.output_item.done"].item.content[0].logprobs,
            by_type["response.completed"].response.output[0].content[0].logprobs,
        ]
        assert [[one.token for one in again] for again in repeated] == [[one.token for one in logprobs]] * 4
        with pytest.raises(openai.BadRequestError, match=r"needs message\.output_text\.logprobs"):
            await client.responses.create(input="Hi", top_logprobs=2)

    asked(test)


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_a_response_is_kept_and_deleted(asked):
    async def test(server, client):
        made = await client.responses.create(input="Hi", metadata={"a": "b"})
        kept = await client.responses.retrieve(made.id)
        assert kept == made
        assert kept.metadata == {"a": "b"}
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.responses.cancel(made.id)
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(made.id)
            assert caught.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="Hi", previous_response_id=made.id)
        assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")

    asked(test)


def test_store_false_keeps_nothing(asked):
    async def test(server, client):
        made = await client.responses.create(input="Hi", store=False)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)

    asked(test)


def test_a_streamed_response_is_kept_when_its_client_learns_of_its_end(asked):
    async def test(server, client):
        events = await streamed(client, input="Hi")
        assert await client.responses.retrieve(events[-1].response.id) == events[-1].response

    asked(test)


def test_a_conversation(asked):
    async def test(server, client):
        server.fake.reply_to = lambda request, index: f"Answer {len(server.requests())}."
        first = await client.responses.create(input="One", instructions="Be kind.")
        second = await client.responses.create(input="Two", previous_response_id=first.id)
        third = await client.responses.create(
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Three"}]}],
            previous_response_id=second.id,
            instructions="Be short.",
        )
        # instructions are not inherited
        turns = "<|user|>One<|end|><|assistant|>Answer 1.<|end|><|user|>Two<|end|><|assistant|>Answer 2.<|end|>"
        assert prompt_of(server) == f"<|system|>Be short.<|end|>{turns}<|user|>Three<|end|><|assistant|>"
        items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
        assert [item.content[0].text for item in items] == ["One", "Answer 1.", "Two", "Answer 2.", "Three"]
        assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
        newest = await client.responses.input_items.list(third.id, limit=1)
        assert (newest.data[0].content[0].text, newest.has_more) == ("Three", True)
        assert newest.first_id == newest.last_id == newest.data[0].id
        # without its middle it cannot go on
        await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="Previous response"):
            await client.responses.create(input="Four", previous_response_id=third.id)

    asked(test)


def test_input_that_is_too_long_is_refused_or_cut(asked):
    async def test(server, client):
        turns = []
        for number in range(60):
            turns.append({"role": "user", "content": f"question {number:02} " + "x" * 80})
            turns.append({"role": "assistant", "content": f"answer {number:02}"})
        turns.append({"role": "user", "content": "last"})
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input=turns, instructions="Be kind.")
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        fields = {"input": turns, "instructions": "Be kind.", "truncation": "auto", "max_output_tokens": 50}
        await client.responses.create(**fields)
        prompt = prompt_of(server)
        assert prompt.startswith("<|system|>Be kind.<|end|><|user|>question ")
        assert prompt.endswith("<|user|>last<|end|><|assistant|>")
        first = int(prompt.split("question ")[1][:2])
        # as many turns as fit: one more would not
        one_turn = len("<|user|>question 00 " + "x" * 80 + "<|end|><|assistant|>answer 00<|end|>") - 3 * 6
        assert 0 < first < 60
        num_tokens = len(server.requests()[-1].prompt_token_ids)
        assert num_tokens + 50 <= 4096 < num_tokens + 50 + one_turn + 10

    asked(test)


def test_input_tokens_are_counted(asked):
    async def test(server, client):
        counted = await client.responses.input_tokens.count(input="Hi", instructions="Be kind.", model="byte-model")
        # of one that is to be made in the background, too
        body = {"input": "Hi", "instructions": "Be kind.", "background": True}
        answer = await server.post("/v1/responses/input_tokens", body)
        assert answer.json()["input_tokens"] == counted.input_tokens
        assert server.requests() == []
        await client.responses.create(input="Hi", instructions="Be kind.")
        assert counted.input_tokens == len(server.requests()[0].prompt_token_ids)

    asked(test)


@pytest.mark.parametrize("fields", [{}, {"truncation": "auto"}, {"max_output_tokens": 500}])
def test_those_of_an_input_that_is_too_long_are_counted_too(asked, fields):
    async def test(server, client):
        for size in (100, 4092, 4093, 5000, 50_000):
            counted = await client.responses.input_tokens.count(input="x" * size, model="byte-model", extra_body=fields)
            assert counted.input_tokens == size + 3
        refused = await server.post("/v1/responses/input_tokens", {"input": "x" * 60_000, **fields})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await server.post("/v1/responses", {"input": "x" * 5000, **fields})).status_code == 400

    asked(test)


# ---- what goes wrong ------------------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "Hi"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "Hi", "background_options": {"completion_window": "2h"}}, "background_options"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "Hi", "prompt": {"id": "x"}}, "prompt"),
        ({"input": "Hi", "max_tokens": 5}, "max_tokens"),
        ({"input": "Hi", "max_output_token": 5}, "max_output_token"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "Hi", "temperature": -1}, "temperature"),
        ({"input": "Hi", "truncation": "some"}, "truncation"),
        ({"input": "Hi", "include": ["thoughts"]}, "include"),
        ({"input": "Hi", "metadata": {"a": "x" * 513}}, "metadata"),
        ({"input": "Hi", "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "Hi", "tools": [WEATHER, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": "Hi", "tools": [WEATHER], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"input": [MESSAGE, {"role": "robot", "content": ""}]}, "input[1].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": "Hi", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "Hi", "previous_response_id": "\0"}, "previous_response_id"),
        ({"input": "Hi", "tools": [{**WEATHER, "name": ["x"]}], "tool_choice": ALLOWED}, "tool_choice.tools"),
        ({"input": "Hi", "tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": [{"name": []}]}}, "tool_choice"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(asked, fields, param):
    async def test(server, client):
        answer = await server.post("/v1/responses", fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(
            (param, param.removesuffix(".type"), "This model's maximum", "Previous", "Unknown")
        )
        assert server.requests() == []

    asked(test)


@pytest.mark.parametrize("fields", [{"input": "x" * 5000}, {"max_output_tokens": 4000}, {"min_tokens": 4000}])
def test_what_is_too_long_is_called_by_the_clients_name(asked, fields):
    async def test(server, client):
        answer = await server.post("/v1/responses", {"input": "x" * 400, "store": False, **fields})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        text = answer.json()["error"]["message"]
        assert "input" in text
        assert "messages" not in text
        assert "prompt" not in text

    asked(test)


def test_a_failure_before_the_first_event_has_its_status_and_later_one_an_event(asked):
    async def test(server, client):
        server.fake.failures[0] = "broken"
        with pytest.raises(openai.InternalServerError):
            await streamed(client, input="Hi")
        server.fake.failures.clear()
        server.fake.failures[3] = "broken"
        events = await streamed(client, input="Hi")
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        assert events[-1].response.output[0].status == "incomplete"
        assert events[-1].sequence_number == len(events) - 1

    asked(test)


def test_a_client_that_leaves_aborts_its_response(run, served, on_a_socket):
    async def main():
        async with served() as server, on_a_socket(server) as url, httpx.AsyncClient(base_url=url) as http:
            server.fake.hold(3)
            async with http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if "output_text.delta" in line:
                        break
            while not server.fake.aborted:
                server.fake.changed.clear()
                await server.fake.changed.wait()

    run(main())
