"""LiteLLM: answers, streams, tools, completions, and how it reads errors."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from reporting import KEY, MODEL, URL, WEATHER, run

MESSAGES = [{"role": "user", "content": "What is seven plus five?"}]
SERVER = {"api_base": URL, "api_key": KEY, "num_retries": 0}


def chat(**fields):
    return litellm.completion(
        model=f"openai/{MODEL}", messages=MESSAGES, **{"max_tokens": 8, "temperature": 0, **SERVER, **fields}
    )


def an_answer():
    answer = chat()
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 8


def a_stream():
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat().choices[0].message.content
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == text


def a_call():
    tools = [{"type": "function", "function": WEATHER}]
    message = chat(tools=tools, tool_choice="required", max_tokens=100).choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"


def a_completion():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once upon a time", max_tokens=4, **SERVER
    )
    assert answer.choices[0].text


def as_a_hosted_server():
    answer = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=MESSAGES, max_tokens=4, **SERVER)
    assert answer.choices[0].message.content


def too_long():
    try:
        litellm.completion(model=f"openai/{MODEL}", messages=[{"role": "user", "content": "word " * 300_000}], **SERVER)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


def wrong():
    try:
        chat(temperature=-1)
    except litellm.BadRequestError:
        return
    raise AssertionError("no BadRequestError")


def wrong_key():
    if not KEY:
        return
    try:
        chat(api_key="wrong")
    except litellm.AuthenticationError:
        return
    raise AssertionError("no AuthenticationError")


raise SystemExit(run(an_answer, a_stream, a_call, a_completion, as_a_hosted_server, too_long, wrong, wrong_key))
