"""Whole answers: every field that OpenAI sends, with its type."""

from __future__ import annotations

import time
from typing import Any

from conformance.registry import check, check_each
from conformance.target import Target


def chat(target: Target, **fields: Any) -> Any:
    reply = target.post_chat(**fields)
    assert reply.status == 200, reply.body[:300]
    return reply.json


def completion(target: Target, **fields: Any) -> Any:
    reply = target.post_completion(**fields)
    assert reply.status == 200, reply.body[:300]
    return reply.json


@check
def fields_of_a_chat(target: Target) -> None:
    """id, object, created, model, choices, usage and system_fingerprint of a chat."""
    body = chat(target)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert type(body["created"]) is int
    assert abs(body["created"] - time.time()) < 24 * 3600
    assert body["model"] == target.model
    assert "system_fingerprint" in body
    assert len(body["choices"]) == 1


@check
def fields_of_a_message(target: Target) -> None:
    """index, message with role, content and refusal: null, logprobs: null, finish_reason."""
    (choice,) = chat(target)["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in {"stop", "length"}


@check
def fields_of_the_usage(target: Target) -> None:
    """usage adds up, and has cached_tokens and reasoning_tokens."""
    usage = chat(target)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 0
    assert type(usage["prompt_tokens_details"]["cached_tokens"]) is int
    assert type(usage["completion_tokens_details"]["reasoning_tokens"]) is int


@check
def fields_of_a_completion(target: Target) -> None:
    """id, object, created, model, choices and usage of a completion."""
    body = completion(target)
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert type(body["created"]) is int
    assert body["model"] == target.model
    (choice,) = body["choices"]
    assert isinstance(choice["text"], str)
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in {"stop", "length"}
    assert body["usage"]["completion_tokens"] <= 8


@check
def ids_are_new(target: Target) -> None:
    """Two answers have two ids."""
    assert chat(target)["id"] != chat(target)["id"]


@check
def a_limit_is_kept(target: Target) -> None:
    """max_completion_tokens is the number of tokens, and the end is length."""
    body = chat(target, max_completion_tokens=2)
    assert body["usage"]["completion_tokens"] == 2
    assert body["choices"][0]["finish_reason"] == "length"


@check
def the_older_limit_is_kept(target: Target) -> None:
    """max_tokens means the same in a chat."""
    reply = target.client.chat.completions.create(
        model=target.model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=2
    )
    assert reply.usage.completion_tokens == 2


@check
def sixteen_tokens_of_completion(target: Target) -> None:
    """A completion without max_tokens has at most 16 tokens."""
    reply = target.client.completions.create(model=target.model, prompt="Once upon a time")
    assert reply.usage.completion_tokens <= 16


@check
def a_chat_without_a_limit(target: Target) -> None:
    """A chat without a limit is not cut after 16 tokens."""
    fields = {"model": target.model, "messages": [{"role": "user", "content": "Tell me a long story."}]}
    stream = target.client.chat.completions.create(**fields, stream=True, temperature=0)
    num_events, reason = 0, None
    for chunk in stream:
        num_events += 1
        reason = chunk.choices[0].finish_reason if chunk.choices else reason
        if num_events > 40:
            break
    stream.close()
    assert num_events > 40 or reason == "stop", (num_events, reason)


@check_each({"1": 1, "2": 2, "3": 3})
def several_answers(target: Target, row: object) -> None:
    """Indices of n ="""
    body = chat(target, n=row, max_completion_tokens=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(int(str(row))))


@check
def several_prompts(target: Target) -> None:
    """Two prompts with n=2: index = prompt * n + answer."""
    body = completion(target, prompt=["Once upon a time", "The"], n=2, echo=True, max_tokens=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    begins = [choice["text"][:3] for choice in body["choices"]]
    assert begins == ["Onc", "Onc", "The", "The"], begins


@check
def a_prompt_of_tokens(target: Target) -> None:
    """Token ids as a prompt, alone and as a list of lists."""
    one = completion(target, prompt=[5, 6, 7], max_tokens=2)
    two = completion(target, prompt=[[5, 6, 7], [5, 6]], max_tokens=2)
    assert one["choices"][0]["text"] == two["choices"][0]["text"]
    assert len(two["choices"]) == 2


@check
def parts_of_a_content(target: Target) -> None:
    """A content may be a list of texts."""
    parts = [{"type": "text", "text": "What is seven"}, {"type": "text", "text": "plus five?"}]
    assert chat(target, messages=[{"role": "user", "content": parts}])["choices"]


@check_each({role: role for role in ("system", "developer")})
def instructions(target: Target, row: object) -> None:
    """A first message of the role"""
    messages = [{"role": row, "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert chat(target, messages=messages)["choices"]


@check
def a_conversation(target: Target) -> None:
    """A chat of several turns, as the client sends the assistant's message back."""
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    messages.append(target.chat(messages=messages).choices[0].message)
    messages.append({"role": "user", "content": "And now?", "name": "Ada"})
    assert target.chat(messages=messages).choices[0].message.content is not None


@check
def null_means_unsaid(target: Target) -> None:
    """Fields that are null are as if they were left out."""
    names = ("stop", "n", "seed", "top_p", "logprobs", "tools", "tool_choice", "response_format", "stream",
             "stream_options", "logit_bias", "presence_penalty", "user", "metadata")  # fmt: skip
    body = chat(target, **dict.fromkeys(names))
    assert body["choices"][0]["message"]["content"] == chat(target)["choices"][0]["message"]["content"]


@check
def a_seed_repeats(target: Target) -> None:
    """The same seed gives the same text, another one another."""
    fields = {"temperature": 2.0, "max_completion_tokens": 24}
    texts = [chat(target, seed=seed, **fields)["choices"][0]["message"]["content"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@check
def temperature_zero_repeats(target: Target) -> None:
    """Temperature 0 gives the same text again."""
    assert chat(target)["choices"][0]["message"] == chat(target)["choices"][0]["message"]


@check
def a_bias_counts(target: Target) -> None:
    """A bias of 100 decides the next token."""
    plain = completion(target, max_tokens=1, logprobs=2)["choices"][0]["logprobs"]["top_logprobs"][0]
    bodies = [completion(target, max_tokens=1, logit_bias={str(token): 100}) for token in (300, 301)]
    assert len({body["choices"][0]["text"] for body in bodies} | set(plain)) >= 3


@check
def a_penalty_counts(target: Target) -> None:
    """A frequency_penalty below 0 makes a text repeat itself, one above 0 keeps it from that."""
    fields = {"prompt": "one one one one one one one one", "max_tokens": 40, "temperature": 0}
    repeating, penalised = (completion(target, **fields, frequency_penalty=value) for value in (-2.0, 2.0))
    assert repeating["choices"][0]["text"] != penalised["choices"][0]["text"]
