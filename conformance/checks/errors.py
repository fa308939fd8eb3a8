"""Errors: status, type, param, code and text, as official clients read them."""

from __future__ import annotations

import openai

from conformance.registry import Skip, check, check_each
from conformance.target import CHAT, COMPLETIONS, MESSAGES, Reply, Target, answers_on

USER = {"role": "user", "content": "x"}
# fields that are wrong, and the param that must name them
WRONG_FIELDS: dict[str, object] = {
    "temperature below its range": ({"temperature": -1}, "temperature"),
    "temperature that is a text": ({"temperature": "hot"}, "temperature"),
    "top_p above its range": ({"top_p": 1.1}, "top_p"),
    "presence_penalty above its range": ({"presence_penalty": 2.01}, "presence_penalty"),
    "frequency_penalty below its range": ({"frequency_penalty": -2.01}, "frequency_penalty"),
    "n of zero": ({"n": 0}, "n"),
    "n of a million": ({"n": 10**6}, "n"),
    "max_completion_tokens of zero": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "seed that is no whole number": ({"seed": 1.5}, "seed"),
    "an empty stop string": ({"stop": ""}, "stop"),
    "17 stop strings": ({"stop": ["x"] * 17}, "stop"),
    "a bias above its range": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "a bias for no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "top_logprobs without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "21 top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "no messages": ({"messages": []}, "messages"),
    "a message of an unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "a second message without content": ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    "a content that is a number": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "an unknown kind of response_format": ({"response_format": {"type": "yaml"}}, "response_format"),
    "a json_schema without a schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
}
# field names that look like others: silence would change the answer
MISSPELT: dict[str, object] = {name: name for name in ("max_token", "response_fromat", "temprature", "tool_choise")}
WRONG_BODIES: dict[str, object] = {
    "nothing": b"",
    "no JSON": b'{"messages": ',
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "invalid UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "half a pair of surrogates": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "100,000 levels": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}
HARMLESS: dict[str, object] = {
    "store": False,
    "metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "verbosity": "low",
    "logit_bias": {},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "x"},
}


def expect(
    reply: Reply, status: int, *, kind: str = "invalid_request_error", code: str | None = None
) -> dict[str, object]:
    assert reply.status == status, f"status {reply.status}, not {status}: {reply.body[:200]!r}"
    error = reply.error
    assert error["type"] == kind, error
    assert error["code"] == code, error
    return error


@check_each(WRONG_FIELDS)
def a_wrong_field_is_named(target: Target, row: object) -> None:
    """400, and param names the field"""
    fields, param = row
    assert expect(target.post_chat(**fields), 400)["param"] == param


@check_each(MISSPELT)
def a_misspelt_field_is_refused(target: Target, row: object) -> None:
    """400 for an unknown field that resembles a known one"""
    assert expect(target.post_chat(**{str(row): 1}), 400)["param"] == row


@check_each(WRONG_BODIES)
def a_wrong_body_is_refused(target: Target, row: object) -> None:
    """400 for a body that is"""
    expect(target.post(CHAT, row), 400)


@check_each({name: (name, value) for name, value in HARMLESS.items()})
def a_harmless_field_is_accepted(target: Target, row: object) -> None:
    """200 with"""
    name, value = row
    reply = target.post_chat(**{name: value, "max_completion_tokens": 1})
    assert reply.status == 200, reply.body[:200]


@check
def a_chat_that_is_too_long(target: Target) -> None:
    """A chat beyond the context: context_length_exceeded, param messages, OpenAI's text."""
    reply = target.post_chat(messages=[{"role": "user", "content": "word " * 400_000}])
    error = expect(reply, 400, code="context_length_exceeded")
    assert error["param"] == "messages", error
    assert str(error["message"]).startswith("This model's maximum context length is "), error
    assert "Please reduce the length of the messages" in str(error["message"]), error


@check
def a_completion_that_is_too_long(target: Target) -> None:
    """Prompt and max_tokens beyond the context: context_length_exceeded, with the sum in the text."""
    error = expect(target.post_completion(max_tokens=10_000_000), 400, code="context_length_exceeded")
    assert error["param"] in ("max_tokens", "prompt"), error
    assert str(error["message"]).startswith("This model's maximum context length is "), error
    assert "10000000 in the completion" in str(error["message"]), error


@check
def two_limits_that_differ(target: Target) -> None:
    """400 for max_tokens and max_completion_tokens that are not the same."""
    expect(target.post_chat(max_tokens=3, max_completion_tokens=4), 400)


@check
def two_limits_that_agree(target: Target) -> None:
    """200 for max_tokens and max_completion_tokens that are the same."""
    assert target.post_chat(max_tokens=2, max_completion_tokens=2).status == 200


def with_key(target: Target) -> None:
    if not target.api_key:
        raise Skip("the server needs no key")


@check
def no_key(target: Target) -> None:
    """401 without a key, with WWW-Authenticate: Bearer."""
    with_key(target)
    reply = target.request("GET", "/v1/models", headers={"Authorization": ""})
    expect(reply, 401)
    assert reply.headers["www-authenticate"] == "Bearer"


@check
def a_wrong_key(target: Target) -> None:
    """401 invalid_api_key for a wrong key, with OpenAI's text; the key is not repeated."""
    with_key(target)
    reply = target.get("/v1/models", Authorization="Bearer sk-wrong-key")
    error = expect(reply, 401, code="invalid_api_key")
    # LiteLLM tells it from other mistakes by these words
    assert "Incorrect API key provided" in str(error["message"]), error
    assert reply.headers["www-authenticate"] == "Bearer"
    assert b"sk-wrong-key" not in reply.body


@check
def an_unknown_model(target: Target) -> None:
    """404 model_not_found for an unknown model, with OpenAI's text."""
    error = expect(target.post_chat(model="no/such-model"), 404, code="model_not_found")
    assert str(error["message"]).startswith("The model `no/such-model` does not exist"), error


@check
def an_unknown_url(target: Target) -> None:
    """404 for an unknown URL, with OpenAI's text."""
    error = expect(target.post("/v1/nowhere", {}), 404)
    assert "Invalid URL (POST /v1/nowhere)" in str(error["message"]), error


@check_each({"GET of chats": ("GET", CHAT), "DELETE of completions": ("DELETE", COMPLETIONS)})
def a_wrong_method(target: Target, row: object) -> None:
    """405 method_not_supported with Allow"""
    reply = target.request(*row)
    expect(reply, 405, code="method_not_supported")
    assert "POST" in reply.headers["allow"]


@check_each({"text/plain": "text/plain", "none": "", "form": "application/x-www-form-urlencoded"})
def a_wrong_media_type(target: Target, row: object) -> None:
    """415 for the media type"""
    expect(target.post(CHAT, {"messages": MESSAGES}, **{"Content-Type": str(row)}), 415)


@check
def a_compressed_body(target: Target) -> None:
    """415 for a compressed body."""
    expect(target.post(CHAT, b"\x1f\x8b", **{"Content-Encoding": "gzip"}), 415)


@check
def a_body_that_is_too_large(target: Target) -> None:
    """413 for a body of 33 MiB."""
    size = 33 * 2**20
    lines = ("Content-Type: application/json", f"Content-Length: {size}", "Connection: close")
    with target.connected() as connection:
        connection.sendall(target.head("POST", CHAT, *lines))
        try:
            for _ in range(33):
                connection.sendall(b" " * 2**20)
        except OSError:
            pass  # it may have answered already
        (reply,) = answers_on(connection)
    expect(reply, 413)


@check_each({"one of 70 KB": {"x-long": "y" * 70_000}, "101 of them": {f"x-{i}": "1" for i in range(101)}})
def headers_that_are_too_large(target: Target, row: object) -> None:
    """431 for headers"""
    expect(target.request("GET", "/v1/models", headers=row), 431)


@check
def what_is_no_http(target: Target) -> None:
    """400 with an error object for bytes that are no HTTP."""
    (reply,) = target.exchange(b"\x16\x03\x01 hello\r\n\r\n")
    expect(reply, 400)


@check
def an_error_before_the_first_byte_of_a_stream(target: Target) -> None:
    """A stream that cannot start has the error's own status."""
    expect(target.post_chat(stream=True, temperature=-1), 400)


@check
def errors_are_the_classes_of_the_client(target: Target) -> None:
    """BadRequestError and NotFoundError, with param, code and request id."""
    for fields, kind, param, code in (
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"model": "gpt-x"}, openai.NotFoundError, "model", "model_not_found"),
    ):
        try:
            target.chat(**fields)
        except kind as error:
            assert (error.param, error.code) == (param, code), (error.param, error.code)
            assert error.request_id
        else:
            raise AssertionError("no error")


@check
def a_wrong_key_is_an_authentication_error(target: Target) -> None:
    """AuthenticationError for a wrong key."""
    with_key(target)
    try:
        target.client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error.code
    else:
        raise AssertionError("no error")
