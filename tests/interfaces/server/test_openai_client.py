"""A real server with the embedded model, driven by the official client: what an application does, and what it sees."""

import json
import os
import signal
from typing import Annotated

import httpx2 as httpx
import openai
import psutil
import pydantic
import pytest
from tests.support.server_process import ServerProcess

SERVE = ["-m", "quire.interfaces.cli", "serve", "--port", "0"]
MODEL = "quire-embedded"
MESSAGES = [{"role": "user", "content": "What is seven plus five?"}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def url():
    with ServerProcess(SERVE) as server:
        yield server.wait_ready(300)
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def idle_statistics(url: str) -> dict[str, float]:
    """The engine's gauges, once nothing runs: aborts reach the engine a little after the client has left."""
    while True:
        found = {}
        for line in httpx.get(url + "/metrics", timeout=30).text.splitlines():
            if not line.startswith("#") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] = float(value)
        if found["quire:num_requests_running"] == found["quire:num_requests_waiting"] == 0:
            return found


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "quire"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/none")
    assert caught.value.code == "model_not_found"


def test_a_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 8
    assert answer._request_id


def test_a_streamed_chat_is_the_same_text(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_clients_own_stream_reader(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.stream(**fields, n=2, logprobs=True, top_logprobs=1) as stream:
        for _ in stream:
            pass
        # the reader insists on an end of its own, and this one ends by its length
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            stream.get_final_completion()
    final = caught.value.completion
    assert [choice.index for choice in final.choices] == [0, 1]
    for choice in final.choices:
        assert choice.message.content is not None
        assert choice.logprobs.content


def test_several_answers_and_a_seed(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "n": 3, "seed": 7, "temperature": 2.0}
    fields["extra_body"] = {"ignore_eos": True}
    first, second = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    other = client.chat.completions.create(**{**fields, "seed": 8})
    assert texts != [choice.message.content for choice in other.choices]


def test_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    content = choice.logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # greedy: the chosen one is the best
        assert entry.logprob == values[0] <= 0
        assert entry.token == entry.top_logprobs[0].token
    if choice.finish_reason == "length":
        assert (
            bytes(byte for entry in content for byte in entry.bytes).decode(errors="replace") == choice.message.content
        )


def test_a_completion_and_its_stream(client):
    fields = {"model": MODEL, "prompt": [PROMPT, "The"], "max_tokens": 10, "temperature": 0}
    whole = client.completions.create(**fields, echo=True)
    texts = [""] * 2
    for chunk in client.completions.create(**fields, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith(PROMPT)
    bare = client.completions.create(**fields)
    assert [choice.text for choice in whole.choices] == [PROMPT + bare.choices[0].text, "The" + bare.choices[1].text]


def test_tokens_in_are_text_in(client, url):
    tokens = httpx.post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    fields = {"model": MODEL, "max_tokens": 10, "temperature": 0}
    answers = [
        client.completions.create(prompt=prompt, **fields).choices[0].text for prompt in (PROMPT, tokens, [tokens])
    ]
    assert answers[0] == answers[1] == answers[2]


def test_scores_of_a_prompt(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert PROMPT.startswith(token, offset)


def test_stop_strings(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0}
    plain = client.chat.completions.create(**fields).choices[0].message.content
    stop = plain[len(plain) // 2 :][:3]
    stopped = client.chat.completions.create(**fields, stop=[stop])
    assert stopped.choices[0].message.content == plain[: plain.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**fields, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain[: plain.index(stop)]


def test_extensions(client):
    body = {"top_k": 1, "min_tokens": 20, "ignore_eos": True, "repetition_penalty": 1.1}
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20, extra_body=body)
    assert answer.usage.completion_tokens == 20
    assert answer.choices[0].finish_reason == "length"


def test_beams(client):
    body = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    fields = {"model": MODEL, "prompt": PROMPT, "n": 4, "max_tokens": 12, "logprobs": 1, "extra_body": body}
    whole = client.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.logprobs.tokens) for choice in whole.choices}) == 4
    scores = [sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) ** 0.5 for c in whole.choices]
    assert scores == sorted(scores, reverse=True)
    assert whole.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in whole.choices)
    texts = ["", "", "", ""]
    for chunk in client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields, logit_bias={"7": 5})
    assert caught.value.param == "logit_bias"


def test_logit_bias_and_allowed_tokens(client, url):
    (token,) = httpx.post(url + "/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"]
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    assert client.completions.create(**fields, logit_bias={str(token): 100}).choices[0].text == "aaaa"
    assert client.completions.create(**fields, extra_body={"allowed_token_ids": [token]}).choices[0].text == "aaaa"


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]


def test_an_answer_in_a_form(client):
    """As the client asks for it with a class of pydantic, and by hand; whole and as a stream."""

    class Person(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=10)]
        age: Annotated[int, pydantic.Field(ge=0, le=99)]

    fields = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 200, "temperature": 0}
    parsed = client.chat.completions.parse(**fields, response_format=Person).choices[0].message.parsed
    assert isinstance(parsed, Person)
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    answer = {"type": "json_schema", "json_schema": schema}
    stream = client.chat.completions.create(**fields, response_format=answer, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert Person.model_validate_json(text)
    many = client.chat.completions.create(**fields, extra_body={"guided_choice": ["yes", "no"]}, n=3)
    assert {choice.message.content for choice in many.choices} <= {"yes", "no"}
    completion = client.completions.create(
        model=MODEL, prompt=["a", "b"], extra_body={"structured_outputs": {"regex": r"\d{4}"}}
    )
    assert all(choice.text.isdigit() and len(choice.text) == 4 for choice in completion.choices)
    schema["schema"] = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"#/properties/a: Unimplemented keys: .*uniqueItems") as caught:
        client.chat.completions.create(**fields, response_format=answer)
    assert caught.value.param == "response_format"


def test_a_tool_is_called_and_its_result_is_read(client):
    fields = {"model": MODEL, "temperature": 0, "tools": TOOLS}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = client.chat.completions.create(messages=messages, **fields).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "temperature": 21}'}
    answer = client.chat.completions.create(messages=[*messages, choice.message, result], **fields).choices[0]
    assert answer.finish_reason == "stop"
    assert "sunny" in answer.message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_the_model_would_not_make(client, choice):
    parameters = {**CITY, "additionalProperties": False, "properties": {"city": {"type": "string", "maxLength": 12}}}
    tools = [{"type": "function", "function": {**WEATHER, "parameters": parameters}}]
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "tools": tools, "parallel_tool_calls": False}
    assert client.chat.completions.create(**fields).choices[0].message.tool_calls is None
    answer = client.chat.completions.create(**fields, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "get_weather")
    assert json.loads(call.function.arguments).keys() == {"city"}
    parameters["properties"]["city"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields, tool_choice=choice)
    assert caught.value.param == "tools"


MISTAKES = {
    "range": ({"temperature": -1}, openai.BadRequestError, "temperature", None),
    "length": (
        {"max_completion_tokens": 10**6},
        openai.BadRequestError,
        "max_completion_tokens",
        "context_length_exceeded",
    ),
    "model": ({"model": "gpt-x"}, openai.NotFoundError, "model", "model_not_found"),
    "json": ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format", None),
    "misspelt": ({"extra_body": {"max_token": 3}}, openai.BadRequestError, "max_token", None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", MISTAKES)
def test_errors_are_the_clients_classes(client, case, stream):
    fields, kind, param, code = MISTAKES[case]
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields}, stream=stream)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id


def test_a_conversation_reuses_its_prefix(client):
    messages = [{"role": "user", "content": "Tell me about paged attention and the blocks of its cache. " * 3}]
    fields = {"model": MODEL, "max_completion_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **fields)
    again = client.chat.completions.create(messages=messages, **fields)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_blocks(client, url, stream):
    body = {"messages": MESSAGES, "max_tokens": 800, "ignore_eos": True, "stream": stream, "n": 4}
    if stream:
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(url + "/v1/chat/completions", json=body, timeout=0.3)
    found = idle_statistics(url)
    assert found["quire:kv_cache_blocks_held"] == 0
    assert found["quire:num_requests_open"] == 0
    # and the server goes on
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices


def test_metrics_count_what_happened(client, url):
    before = idle_statistics(url)
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True})
    after = idle_statistics(url)
    assert after["quire:generation_tokens_total"] - before["quire:generation_tokens_total"] == 5
    assert after["quire:time_to_first_token_seconds_count"] - before["quire:time_to_first_token_seconds_count"] == 1
    assert after["quire:kv_cache_usage_perc"] == 0


def test_an_engine_that_is_killed_comes_back_or_ends_the_server():
    with ServerProcess([*SERVE, "--max-engine-restarts", "1", "--engine-restart-window", "600"]) as server:
        url = server.wait_ready(300)
        for status in (None, 70):
            children = psutil.Process(server.pid).children(recursive=True)
            body = {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                for child in children:
                    os.kill(child.pid, signal.SIGKILL)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_restarted"
            if status is None:
                server.wait_for("the engine serves again")
        assert server.wait() == 70
        assert not [child for child in children if child.is_running()]
