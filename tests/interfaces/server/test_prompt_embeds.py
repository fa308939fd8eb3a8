"""Prompts of vectors over HTTP, as clients of vLLM send them."""

import base64
import io

import httpx2 as httpx
import openai
import pytest
import torch
from tests.interfaces.test_prompt_embeds import TABLE, TOKENS
from tests.support.server_process import ServerProcess

OPTIONS = ["--port", "0", "--max-model-len", "128", "--enable-prompt-embeds", "--num-threads", "1"]
OPTIONS += ["--trust-request-chat-template"]
THOUGHTS = "{% for m in messages %}{{ m.role }}[{{ m.reasoning }}]{{ m.content }};{% endfor %}"


def encoded(tensor: torch.Tensor) -> str:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return base64.b64encode(stream.getvalue()).decode()


FIRST, SECOND = (encoded(TABLE[ids]) for ids in TOKENS[:2])


@pytest.fixture(scope="module")
def url():
    with ServerProcess(["-m", "quire.interfaces.cli", "serve", *OPTIONS]) as server:
        yield server.wait_ready(300) + "/v1"
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def complete(client, given=None, prompt=None, **fields):
    extra = {} if given is None else {"prompt_embeds": given}
    return client.completions.create(
        model="embedded", prompt=prompt, max_tokens=6, temperature=0, extra_body=extra, **fields
    )


def test_alone_in_a_list_and_beside_texts(client):
    expected = [complete(client, prompt=ids, logprobs=2).choices[0] for ids in TOKENS[:2]]
    alone = complete(client, FIRST, logprobs=2)
    assert (alone.choices[0].text, alone.choices[0].logprobs) == (expected[0].text, expected[0].logprobs)
    assert alone.usage.prompt_tokens == len(TOKENS[0])
    both = complete(client, [FIRST, SECOND])
    assert [one.text for one in both.choices] == [one.text for one in expected]
    beside = complete(client, SECOND, prompt="2+3=")
    assert [one.text for one in beside.choices] == [expected[1].text, complete(client, prompt="2+3=").choices[0].text]
    # what clients write that must give a prompt
    for empty in ("", []):
        assert [one.text for one in complete(client, FIRST, prompt=empty).choices] == [expected[0].text]
    assert complete(client, [], prompt="2+3=").choices[0].text == beside.choices[1].text
    streamed = complete(client, [FIRST, SECOND], stream=True)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one.text for one in expected]


BAD = [
    ({}, "Either prompt or prompt_embeds must be provided"),
    ({"prompt_embeds": []}, "Either prompt or prompt_embeds must be provided"),
    ({"prompt_embeds": [FIRST] * 257}, "at most 256"),
    ({"prompt_embeds": [FIRST, "AAAA"]}, "prompt_embeds[1]: "),
    ({"prompt_embeds": "invalid_base64"}, "base64"),
    ({"prompt_embeds": encoded(TABLE[TOKENS[0]].to_sparse())}, "dense"),
    ({"prompt_embeds": encoded(TABLE[[5] * 128])}, "maximum context length"),
    ({"prompt_embeds": encoded(TABLE[[5] * 129])}, "is too large"),
    ({"prompt_embeds": "A" * 2_000_000}, "characters are too many"),
    ({"prompt_embeds": FIRST, "echo": True}, "echo is not supported with prompt_embeds"),
    ({"prompt_embeds": FIRST, "suffix": "x"}, "suffix is not supported with prompt_embeds"),
    ({"prompt_embeds": FIRST, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not supported"),
    ({"prompt_embeds": FIRST, "prompt_logprobs": 1}, "not compatible"),
    ({"prompt_embeds": FIRST, "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
]


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_refused(url, fields, words):
    answer = httpx.post(url + "/completions", json={"max_tokens": 2, **fields}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_chat_takes_none(url):
    answer = httpx.post(
        url + "/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "prompt_embeds": FIRST}
    )
    assert "prompts of /v1/completions" in answer.json()["error"]["message"]


def part(url, text):
    """A text as the vectors of its tokens."""
    root = url.removesuffix("/v1")
    answer = httpx.post(root + "/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=60)
    return {"type": "prompt_embeds", "data": encoded(TABLE[answer.json()["tokens"]])}


def chat(client, messages, **fields):
    return client.chat.completions.create(
        model="embedded", messages=messages, max_tokens=8, temperature=0, logprobs=True, **fields
    )


@pytest.mark.parametrize("texts", [["a dog", "and", "a cat"], ["a dog"]])
def test_parts_of_a_chat(client, url, texts):
    """Texts, every second of them as vectors, in each of two messages."""
    of_text = [{"type": "text", "text": text} for text in texts]
    mixed = [part(url, text) if number % 2 == 0 else of_text[number] for number, text in enumerate(texts)]
    expected, found = (
        chat(client, [{"role": "system", "content": parts}, {"role": "user", "content": parts}])
        for parts in (of_text, mixed)
    )
    assert found.choices == expected.choices
    assert found.usage == expected.usage
    streamed = chat(client, [{"role": "system", "content": mixed}, {"role": "user", "content": mixed}], stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert said == expected.choices[0].message.content


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_that_are_vectors(client, url, name):
    def asked(thought):
        messages = [{"role": "assistant", "content": "So", name: thought}, {"role": "user", "content": "Go on"}]
        return chat(client, messages, extra_body={"chat_template": THOUGHTS})

    assert asked(part(url, "a thought")).choices == asked("a thought").choices


BAD_PARTS = [
    ({"type": "prompt_embeds"}, {}, "messages[0].content[0].data: this field is required"),
    ({"type": "prompt_embeds", "data": "not base64!"}, {}, "messages[0].content[0].data: must be base64"),
    ({"type": "prompt_embeds", "data": 3}, {}, "messages[0].content[0].data"),
    ({"type": "prompt_embeds", "data": FIRST}, {"add_special_tokens": True}, "add_special_tokens: not with"),
    ({"type": "prompt_embeds", "data": FIRST}, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens: not with"),
    ({"type": "prompt_embeds", "data": FIRST}, {"prompt_logprobs": True}, "prompt_logprobs: not compatible"),
    ({"type": "prompt_embeds", "data": FIRST}, {"chat_template": "{{ 1 }}"}, "does not write each of the 1"),
    (
        {"type": "prompt_embeds", "data": FIRST},
        {"chat_template": "{{ messages[0].content }}{{ messages[0].content }}"},
        "does not write each of the 1",
    ),
    ({"type": "text", "text": "x"}, {"chat_template": "/etc/passwd"}, "files are not read"),
    ({"type": "text", "text": "x"}, {"chat_template": "{{ x"}, "chat_template"),
    ({"type": "text", "text": "x"}, {"chat_template": "{{ " + "x + " * 1500 + "x }}"}, "nested too deep"),
    ({"type": "text", "text": "x"}, {"chat_template": "{{ x }}" * 4500}, "more than 4,096 nodes"),
    ({"type": "text", "text": "x"}, {"chat_template": "{{ x }}" + "y" * 40_000}, "at most 32,768 are taken"),
    (
        {"type": "text", "text": "x"},
        {"chat_template": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"},
        "it keeps nobody waiting",
    ),
]


@pytest.mark.parametrize(("content", "fields", "words"), BAD_PARTS)
def test_bad_parts_of_a_chat(url, content, fields, words):
    body = {"messages": [{"role": "user", "content": [content]}], "max_tokens": 2, **fields}
    answer = httpx.post(url + "/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_vectors_are_read_no_further_than_the_model_goes(url):
    """A few bytes may stand for many numbers, and a body has room for thousands of such parts: what is wrong with the
    third is not even seen."""
    parts = [{"type": "prompt_embeds", "data": encoded(TABLE[[5] * 100])}] * 2
    parts.append({"type": "prompt_embeds", "data": "AAAA"})
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    answer = httpx.post(url + "/chat/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("messages[0].content[1].data: with what stands before them")


def test_an_embedding_of_a_chat_takes_none(url):
    messages = [{"role": "user", "content": [{"type": "prompt_embeds", "data": FIRST}]}]
    answer = httpx.post(url + "/embeddings", json={"messages": messages}, timeout=60)
    assert "leave images, videos and prompt_embeds out" in answer.json()["error"]["message"]
