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
