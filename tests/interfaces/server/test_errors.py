"""Errors: their shape, status, type, code and param, for everything that a request can get wrong (OpenAI's rules)."""

import json

import pytest
from tests.support.sampled import sampled

from quire.renderer.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def error_of(response) -> dict:
    """The error object, after a check of what holds for all of them."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) <= 4096
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    for leak in ("Traceback", "0x", "/home", "site-packages", "msgspec", "pydantic"):
        assert leak not in error["message"]
    return error


CHAT_MISTAKES = {
    "misspelt field": ({"max_token": 3}, "max_token"),
    "misspelt response_format": ({"response_fromat": {}}, "response_fromat"),
    "guided decoding": ({"guided_regex": ""}, "guided_regex"),
    "json mode": ({"response_format": {"type": "json"}}, "response_format"),
    "tool_choice required": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "tool_choice named": ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    "tool_choice without tools": ({"tool_choice": "auto"}, "tool_choice"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities"),
    "template": ({"chat_template": "{{ 1 }}"}, "chat_template"),
    "best_of": ({"best_of": 2}, "best_of"),
    "no messages": ({"messages": []}, "messages"),
    "messages null": ({"messages": None}, "messages"),
    "message no object": ({"messages": ["Hi"]}, "messages[0]"),
    "unknown role": ({"messages": [*MESSAGES, {"role": "ro:bot", "content": "x"}]}, "messages[1].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "content number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "text part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    "bad arguments in history": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    "tool without name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "tool twice": ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    "temperature text": ({"temperature": "hot"}, "temperature"),
    "temperature below": ({"temperature": -1}, "temperature"),
    "temperature above": ({"temperature": 1e308}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "top_p bool": ({"top_p": True}, "top_p"),
    "n zero": ({"n": 0}, "n"),
    "n many": ({"n": 10**6}, "n"),
    "n above the rows": ({"n": 9}, "n"),
    "priority huge": ({"priority": 10**30}, "priority"),
    "n fraction": ({"n": 1.5}, "n"),
    "seed huge": ({"seed": 2**65}, "seed"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop numbers": ({"stop": [1]}, "stop[0]"),
    "stop long": ({"stop": "x" * 1025}, "stop"),
    "stop many": ({"stop": ["x"] * 17}, "stop"),
    "stop token outside": ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    "stop token negative": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "stop token text": ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    "bias key": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "bias value": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "bias outside": ({"logit_bias": {"99999": 1}}, "logit_bias"),
    "bias long": ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    "bad words many": ({"bad_words": ["x"] * 129}, "bad_words"),
    "allowed none": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_completion_tokens zero": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "two limits": ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    "min above max": ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "top_logprobs many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs negative": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "logprobs number": ({"logprobs": 3}, "logprobs"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stream_options unknown": ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    "prompt_logprobs in a stream": ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    "stream text": ({"stream": "yes"}, "stream"),
    "echo": ({"echo": "x"}, "echo"),
    "continue a user": ({"continue_final_message": True}, "continue_final_message"),
    "continue and open": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
}


@pytest.mark.parametrize("case", CHAT_MISTAKES)
def test_a_mistake_in_a_chat_names_its_field(run, served, case):
    fields, param = CHAT_MISTAKES[case]

    async def main():
        async with served() as server:
            response = await server.post(CHAT, {"messages": MESSAGES, **fields})
            error = error_of(response)
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
            assert error["code"] == ("less_than_equal" if case == "seed huge" else None)
            assert server.requests() == []
            # and the server goes on
            assert (await server.chat()).status_code == 200

    run(main())


COMPLETION_MISTAKES = {
    "no prompt": ({"prompt": None}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "empty text": ({"prompt": ""}, "prompt"),
    "list of empties": ({"prompt": [[]]}, "prompt[0]"),
    "mixed": ({"prompt": ["a", 1]}, "prompt"),
    "bools": ({"prompt": [True]}, "prompt[0]"),
    "bools among tokens": ({"prompt": [[1, True]]}, "prompt[0]"),
    "token outside": ({"prompt": [10**6]}, "prompt"),
    "token negative": ({"prompt": [[1], [2, -1, 3]]}, "prompt[1]"),
    "257 prompts": ({"prompt": ["a"] * 257}, "prompt"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "best_of": ({"best_of": 2}, "best_of"),
    "logprobs many": ({"logprobs": 21}, "logprobs"),
    "logprobs bool": ({"logprobs": True}, "logprobs"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
}


@pytest.mark.parametrize("case", COMPLETION_MISTAKES)
def test_a_mistake_in_a_completion_names_its_field(run, served, case):
    fields, param = COMPLETION_MISTAKES[case]

    async def main():
        async with served() as server:
            response = await server.post("/v1/completions", {"prompt": "Hi", **fields})
            error = error_of(response)
            assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
            assert server.requests() == []

    run(main())


BODIES = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'"x"',
    "trailing comma": b'{"messages": [],}',
    "NaN": b'{"temperature": NaN}',
    "BOM": b"\xef\xbb\xbf{}",
    "UTF-16": '{"messages": []}'.encode("utf-16"),
    "invalid UTF-8": b'{"model": "\xff"}',
    "lone surrogate": b'{"model": "\\ud800"}',
    "NUL": b'{"model": "a\x00b"}',
    "depth": b"[" * 100_000,
    "depth of objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "digits": b'{"seed": ' + b"1" * 100_000 + b"}",
    "huge number": b'{"temperature": 1e999}',
    "no object": b"{}",
}


@pytest.mark.parametrize("text", ["\\ud800", "a\\uDC00b", "\\ud83d\\ude00\\ud83dx", "\\\\\\ud83d\\u0041"])
def test_a_lone_surrogate_is_said_to_be_one(run, served, text):
    async def main():
        async with served() as server:
            headers = {"content-type": "application/json"}
            response = await server.http.post(CHAT, content=f'{{"model": "{text}"}}', headers=headers)
            assert response.status_code == 400
            assert "a lone surrogate, which is no valid Unicode" in error_of(response)["message"]
            response = await server.http.post(CHAT, content=b'{"model": "\\\\ud800"', headers=headers)
            assert "surrogate" not in error_of(response)["message"]

    run(main())


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_is_no_request(run, served, case):
    async def main():
        async with served() as server:
            headers = {"content-type": "application/json"}
            response = await server.http.post(CHAT, content=BODIES[case], headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")
            assert (await server.chat()).status_code == 200

    run(main())


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_media_types_are_refused(run, served, headers):
    async def main():
        async with served() as server:
            body = json.dumps({"messages": MESSAGES}).encode()
            response = await server.http.post(CHAT, content=body, headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (415, "invalid_request_error")

    run(main())


def test_a_charset_is_allowed(run, served):
    async def main():
        async with served() as server:
            body = json.dumps({"messages": MESSAGES}).encode()
            headers = {"content-type": 'application/json; charset="UTF-8"'}
            assert (await server.http.post(CHAT, content=body, headers=headers)).status_code == 200

    run(main())


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_refused_while_it_is_read(run, served, announced):
    async def main():
        async with served() as server:

            async def chunks():
                for _ in range(33):
                    yield b" " * 2**20

            content = b" " * (33 * 2**20) if announced else chunks()
            headers = {"content-type": "application/json"}
            response = await server.http.post(CHAT, content=content, headers=headers)
            assert response.status_code == 413
            assert "8 MiB" in error_of(response)["message"]

    run(main())


def test_wrong_paths_and_methods(run, served):
    async def main():
        async with served() as server:
            response = await server.post("/v1/x", {})
            assert response.status_code == 404
            assert error_of(response) == {
                "message": "Invalid URL (POST /v1/x)",
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
            response = await server.http.get(CHAT)
            assert (response.status_code, response.headers["allow"]) == (405, "POST")
            assert error_of(response)["code"] == "method_not_supported"
            assert (await server.http.get("/v1/models/")).status_code == 404
            assert (await server.post(CHAT + "/", {})).status_code == 404

    run(main())


def test_an_unknown_model(run, served):
    async def main():
        async with served() as server:
            for response in (await server.chat(model="x"), await server.http.get("/v1/models/some/x")):
                assert response.status_code == 404
                error = error_of(response)
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert "does not exist" in error["message"]

    run(main())


def test_context_length(run, served):
    opening = "This model's maximum context length is 64 tokens. However, "

    async def main():
        async with served(max_model_len=64) as server:
            cases = (
                (await server.chat("x" * 100), "messages", "your messages resulted in 103 tokens"),
                (
                    await server.chat("x" * 10, max_tokens=60),
                    "max_tokens",
                    "(13 in the messages, 60 in the completion)",
                ),
                (await server.chat("x", max_completion_tokens=61), "max_completion_tokens", "you requested 65 tokens"),
                (await server.complete("x" * 64), "prompt", "your prompt resulted in 64 tokens"),
                (await server.complete("x" * 60, max_tokens=5), "max_tokens", "you requested 65 tokens"),
                (await server.complete(["x", "x" * 64]), "prompt[1]", "your prompt[1] resulted in 64 tokens"),
                (await server.complete([[1] * 65, [1]]), "prompt[0]", "your prompt[0] resulted in 65 tokens"),
                (
                    await server.complete(["x", "x" * 60], max_tokens=5),
                    "max_tokens",
                    "(60 in the prompt[1], 5 in the completion)",
                ),
                (
                    await server.complete(["x", "x" * 60], min_tokens=9, max_tokens=None),
                    "prompt[1]",
                    "prompt[1] has 60",
                ),
            )
            for response, param, words in cases:
                error = error_of(response)
                assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] == param
                assert error["message"].startswith(opening)
                assert words in error["message"]
            for given, name in (("x" * 3000, "prompt"), (["x", "x" * 3000], "prompt[1]")):
                error = error_of(await server.complete(given))
                assert (error["code"], error["param"]) == ("context_length_exceeded", name)
                assert f"3000 characters were given in your {name}." in error["message"]
            # just fits; and a limit that nobody asked for is no mistake
            assert (await server.complete("x" * 59, max_tokens=5)).status_code == 200
            assert (await server.complete("x" * 60)).json()["usage"]["completion_tokens"] == 4

    run(main())


def test_unknown_fields(run, served, caplog):
    async def main():
        async with served() as server:
            for _ in range(2):
                assert (await server.chat(zzzzzz=1, user="me", store=True, metadata={})).status_code == 200
            assert caplog.text.count("'zzzzzz'") == 1
            assert "metadata" not in caplog.text
        async with served(strict=True) as server:
            response = await server.chat(zzzzzz=1)
            assert (response.status_code, error_of(response)["param"]) == (400, "zzzzzz")
            assert (await server.chat(user="me")).status_code == 200

    run(main())


def test_neutral_values_of_refused_fields_pass(run, served):
    fields = {"best_of": 1, "response_format": {"type": "text"}, "functions": None, "tool_choice": "none"}

    async def main():
        async with served() as server:
            assert (await server.chat(**fields)).status_code == 200
            assert (await server.complete(suffix=None, guided_json=None)).status_code == 200
            nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "stream", "logit_bias", "max_tokens", "seed"))
            assert (await server.chat(**nulls)).status_code == 200

    run(main())


def test_a_failure_in_the_engine(run, served):
    async def main():
        async with served() as server:
            server.fake.failures[3] = "secret of the engine"
            response = await server.chat()
            error = error_of(response)
            assert response.status_code == 500
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            assert "secret" not in response.text
            server.fake.failures.clear()
            assert (await server.chat()).status_code == 200

    run(main())


def test_a_request_that_the_engine_has_no_room_for(run, served):
    async def main():
        async with served() as server:
            server.fake.core.refusal = "KV cache: 2 blocks are needed, the engine has 1. Lower max_tokens."
            for stream in (False, True):
                response = await server.chat(stream=stream)
                assert response.status_code == 400
                assert error_of(response)["message"] == server.fake.core.refusal
            metrics = (await server.http.get("/metrics")).text
            assert 'quire:request_success_total{finished_reason="error",model_name="byte-model"} 2.0' in metrics
            assert 'quire:request_success_total{finished_reason="abort",model_name="byte-model"} 0.0' in metrics

    run(main())


def test_an_unexpected_error_says_nothing(run, served):
    async def main():
        async with served() as server:
            server.engine.prepare = None
            response = await server.chat()
            error = error_of(response)
            assert (response.status_code, error["code"]) == (500, "internal_error")
            assert "NoneType" not in response.text

    run(main())


def test_a_dead_engine(run, served):
    async def main():
        async with served() as server:
            assert (await server.http.get("/health")).status_code == 200
            server.fake.die("killed")
            response = await server.chat()
            assert (response.status_code, error_of(response)["code"]) == (500, "engine_restarted")
            assert response.headers["retry-after"]
            assert (await server.http.get("/health")).status_code == 503
            assert (await server.http.get("/health/ready")).status_code == 503
            assert (await server.http.get("/health/live")).status_code == 200
            assert (await server.http.get("/metrics")).status_code == 200

    run(main())


ODD_VALUES = [
    None,
    "",
    "1",
    "\u0000",
    [],
    {},
    [None],
    [[]],
    {"": 1},
    True,
    1.5,
    -1,
    0,
    1e308,
    2**31,
    2**63,
    2**64,
    -(2**65),
]


@pytest.mark.parametrize(("endpoint", "stream"), sampled(["chat", "completions"], [False, True], n=2))
def test_no_value_of_any_field_breaks_the_server(run, served, endpoint, stream):
    """Every field with values of every type: an answer or a 4xx, never a 5xx, and nothing is left behind."""
    from quire.interfaces.server.openai import chat, completions

    rules = chat.RULES if endpoint == "chat" else completions.RULES
    path = CHAT if endpoint == "chat" else "/v1/completions"
    least = {"messages": MESSAGES} if endpoint == "chat" else {"prompt": "Hi"}

    async def main():
        async with served(max_model_len=64) as server:
            for name in [*rules.implemented, *rules.refused]:
                for value in ODD_VALUES:
                    response = await server.post(path, {**least, "stream": stream, "max_tokens": 2, name: value})
                    assert response.status_code in (200, 400, 404), (name, value, response.text)
                    if response.status_code != 200:
                        assert error_of(response)["message"], (name, value)
            assert not server.fake.running
            assert len(server.state.in_flight) == 0

    run(main())


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(run, served, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **options: pytest.fail("it was tokenised"))

    async def main():
        async with served() as server:
            for response in (await server.chat("a" * 30000), await server.complete("a" * 30000)):
                assert response.status_code == 400
                error = error_of(response)
                assert error["code"] == "context_length_exceeded"
                assert "is 512 tokens, which hold at most 6656 characters. However, 300" in error["message"]

    run(main())


def test_messages_say_what_would_help(run, served):
    async def main():
        async with served() as server:
            assert "echo" in error_of(await server.complete(max_tokens=0))["message"]
            assert "the key 'a' is no token id" in error_of(await server.chat(logit_bias={"a": 1}))["message"]
            latin = {"content-type": "application/json; charset=latin-1"}
            response = await server.http.post(CHAT, content=b"{}", headers=latin)
            assert response.status_code == 415
            assert "UTF-8" in error_of(response)["message"]

    run(main())
