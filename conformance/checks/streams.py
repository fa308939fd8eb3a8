"""Streams: what stands on the wire, and that its sum is the whole answer."""

from __future__ import annotations

from typing import Any

from conformance.registry import check, check_each
from conformance.target import CHAT, COMPLETIONS, Target

USAGE = {"include_usage": True}
ENDS = {"stop", "length", "tool_calls", "content_filter", "function_call"}


def chat_events(target: Target, **fields: Any) -> list[Any]:
    return target.post_chat(stream=True, **fields).events


def completion_events(target: Target, **fields: Any) -> list[Any]:
    return target.post_completion(stream=True, **fields).events


def choices_of(events: list[Any], index: int = 0) -> list[Any]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def content_of(events: list[Any], index: int = 0) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices_of(events, index))


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def headers_of_a_stream(target: Target, row: object) -> None:
    """Content-Type, Cache-Control, X-Accel-Buffering and x-request-id of streamed"""
    reply = (target.post_chat if row == CHAT else target.post_completion)(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8", reply.headers["content-type"]
    assert "no-cache" in reply.headers["cache-control"], reply.headers["cache-control"]
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-request-id"]
    assert reply.headers["content-length"] is None


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def form_of_the_events(target: Target, row: object) -> None:
    """Each event is one line of JSON after `data: `, the last one [DONE], in streamed"""
    reply = (target.post_chat if row == CHAT else target.post_completion)(stream=True)
    assert len(reply.events) >= 2


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def the_same_in_all_events(target: Target, row: object) -> None:
    """id, created, model, object and system_fingerprint are equal in all events of streamed"""
    is_chat = row == CHAT
    events = chat_events(target) if is_chat else completion_events(target)
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events}) == 1, name
    assert events[0]["id"].startswith("chatcmpl-" if is_chat else "cmpl-"), events[0]["id"]
    assert events[0]["object"] == ("chat.completion.chunk" if is_chat else "text_completion"), events[0]["object"]
    assert "system_fingerprint" in events[0]


@check
def the_first_event_has_the_role(target: Target) -> None:
    """The first delta is the role with an empty content; no other has a role."""
    choices = choices_of(chat_events(target))
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}, choices[0]
    assert not any("role" in choice["delta"] for choice in choices[1:])


@check
def the_last_event_has_the_end(target: Target) -> None:
    """The last delta is empty and has the finish_reason; before it there is null."""
    choices = choices_of(chat_events(target))
    assert choices[-1]["delta"] == {}, choices[-1]
    assert choices[-1]["finish_reason"] in ENDS
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@check
def the_ends_of_completions(target: Target) -> None:
    """A streamed completion has one finish_reason, in its last event."""
    choices = choices_of(completion_events(target))
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in {"stop", "length"}


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def usage_comes_last(target: Target, row: object) -> None:
    """With include_usage one more event has the usage and no choices, in streamed"""
    events = (chat_events if row == CHAT else completion_events)(target, stream_options=USAGE)
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert all(event["choices"] for event in events[:-1])


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def usage_is_null_before(target: Target, row: object) -> None:
    """With include_usage all other events say "usage": null, in streamed"""
    events = (chat_events if row == CHAT else completion_events)(target, stream_options=USAGE)
    assert all("usage" in event and event["usage"] is None for event in events[:-1])


@check_each({"chats": CHAT, "completions": COMPLETIONS})
def no_usage_unless_asked(target: Target, row: object) -> None:
    """Without include_usage no event has a usage, in streamed"""
    events = (chat_events if row == CHAT else completion_events)(target)
    assert not any(event.get("usage") for event in events)


@check
def the_usage_of_a_stream_is_that_of_the_whole(target: Target) -> None:
    """The usage of a stream counts what the whole answer counts."""
    streamed = chat_events(target, stream_options=USAGE)[-1]["usage"]
    whole = target.post_chat().json["usage"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert streamed[name] == whole[name], (streamed, whole)


@check
def the_usage_counts_all_choices(target: Target) -> None:
    """The usage of n=2 counts the tokens of both, once the prompt."""
    fields = {"n": 2, "stream_options": USAGE, "max_completion_tokens": 4, "logprobs": True}
    events = chat_events(target, **fields)
    scored = [entry for event in events for choice in event["choices"] if choice["logprobs"]
              for entry in choice["logprobs"]["content"]]  # fmt: skip
    assert events[-1]["usage"]["completion_tokens"] == len(scored)
    one = chat_events(target, stream_options=USAGE, max_completion_tokens=4)[-1]["usage"]
    assert events[-1]["usage"]["prompt_tokens"] == one["prompt_tokens"]


@check
def obfuscation_hides_lengths(target: Target) -> None:
    """With include_obfuscation events of tokens have a padding, and all of them one length."""
    reply = target.post_chat(stream=True, max_completion_tokens=8, stream_options={"include_obfuscation": True})
    events = [event for event in reply.events if event["choices"]]
    assert all(isinstance(event.get("obfuscation"), str) for event in events), events[0]
    sizes = {len(line) for line in reply.body.split(b"\n\n") if b'"content"' in line}
    assert len(sizes) == 1, sizes


@check
def obfuscation_may_be_refused(target: Target) -> None:
    """With include_obfuscation=false there is no padding."""
    events = chat_events(target, stream_options={"include_obfuscation": False})
    assert not any("obfuscation" in event for event in events)


@check
def a_stream_is_the_whole_answer(target: Target) -> None:
    """The deltas of a chat, joined, are the content of the whole answer, with the same end."""
    events = chat_events(target, max_completion_tokens=24)
    whole = target.post_chat(max_completion_tokens=24).json["choices"][0]
    assert content_of(events) == whole["message"]["content"]
    assert choices_of(events)[-1]["finish_reason"] == whole["finish_reason"]


@check
def a_streamed_completion_is_the_whole(target: Target) -> None:
    """The texts of a completion, joined, are the whole text."""
    events = completion_events(target, max_tokens=24)
    whole = target.post_completion(max_tokens=24).json["choices"][0]
    assert "".join(choice["text"] for choice in choices_of(events)) == whole["text"]


@check
def several_answers_in_one_stream(target: Target) -> None:
    """n=3: each index has one role, one end, and the text of the whole answer."""
    fields = {"n": 3, "seed": 11, "temperature": 1.0}
    events = chat_events(target, **fields)
    whole = target.post_chat(**fields).json["choices"]
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
    for index in range(3):
        choices = choices_of(events, index)
        assert sum("role" in choice["delta"] for choice in choices) == 1
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
        assert choices[-1]["finish_reason"] is not None
        assert content_of(events, index) == whole[index]["message"]["content"]


@check
def several_prompts_in_one_stream(target: Target) -> None:
    """Two prompts with n=2: four indices, prompt by prompt, each with its text."""
    fields = {"prompt": ["Once upon a time", "The"], "n": 2, "seed": 3, "temperature": 1.0}
    events = completion_events(target, **fields)
    whole = target.post_completion(**fields).json["choices"]
    for index in range(4):
        assert "".join(choice["text"] for choice in choices_of(events, index)) == whole[index]["text"]


@check
def events_come_as_they_are_made(target: Target) -> None:
    """The first event does not wait for the last one."""
    reply = target.post_chat(stream=True, max_completion_tokens=48)
    assert len(set(reply.times)) >= 2, "all events came at once"


@check
def scores_in_a_stream(target: Target) -> None:
    """logprobs of a streamed chat are those of the whole one."""
    fields = {"logprobs": True, "top_logprobs": 2}
    streamed = [entry for choice in choices_of(chat_events(target, **fields)) if choice["logprobs"]
                for entry in choice["logprobs"]["content"]]  # fmt: skip
    whole = target.post_chat(**fields).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for mine, other in zip(streamed, whole, strict=True):
        assert abs(mine["logprob"] - other["logprob"]) < 0.05
        assert len(mine["top_logprobs"]) == 2


@check
def an_echo_in_a_stream(target: Target) -> None:
    """echo: the prompt comes first, once a choice."""
    events = completion_events(target, echo=True, n=2)
    for index in range(2):
        text = "".join(choice["text"] for choice in choices_of(events, index))
        assert text.startswith("Once upon a time")
        assert text.count("Once upon a time") == 1 or "Once upon a time" in text[16:]


@check
def scores_of_an_echo_in_a_stream(target: Target) -> None:
    """echo with logprobs: the columns, joined, are those of the whole answer."""
    fields = {"echo": True, "logprobs": 1, "max_tokens": 4}
    columns: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": []}
    for choice in choices_of(completion_events(target, **fields)):
        for name, column in columns.items():
            column += (choice["logprobs"] or {}).get(name, [])
    whole = target.post_completion(**fields).json["choices"][0]["logprobs"]
    assert columns["tokens"] == whole["tokens"]
    assert columns["text_offset"] == whole["text_offset"]
    assert columns["token_logprobs"][0] is None


@check
def the_stream_reader_of_the_client(target: Target) -> None:
    """client.chat.completions.stream gathers the final message."""
    fields = {"model": target.model, "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
    with target.client.chat.completions.stream(**fields, max_completion_tokens=200) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content


@check
def a_client_that_leaves(target: Target) -> None:
    """A client that closes a stream harms nobody."""
    with target.chat(stream=True, max_completion_tokens=200) as stream:
        next(iter(stream))
    assert target.post_chat(max_completion_tokens=1).status == 200
