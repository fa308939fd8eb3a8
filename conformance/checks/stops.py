"""Stop strings: the text ends before the first of them, and a stream never shows what is cut later."""

from __future__ import annotations

from collections.abc import Callable

from conformance.checks.streams import choices_of, completion_events
from conformance.registry import check, check_each
from conformance.target import Target

LENGTH = 40


def plain(target: Target) -> str:
    text = str(target.post_completion(max_tokens=LENGTH).json["choices"][0]["text"])
    assert len(text) > 20, text
    return text


# from a text to strings that occur in it
STOPS: dict[str, object] = {
    "one character": lambda text: [text[10]],
    "a part of a word": lambda text: [text[9:12]],
    "across many tokens": lambda text: [text[5:19]],
    "two that overlap": lambda text: [text[8:10], text[8:12]],
    "the earlier of two": lambda text: [text[14:18], text[6:10]],
    "the first character": lambda text: [text[0]],
    "one that never comes": lambda text: ["\u0000never"],
    "four": lambda text: [text[12:15], text[14:16], "\u0001", text[18:20]],
}


def expected(text: str, stops: list[str]) -> str:
    found = [text.index(stop) for stop in stops if stop in text]
    # the one that ends first wins
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[: found[ends.index(min(ends))]] if found else text


@check_each(STOPS)
def a_stop_string(target: Target, row: object) -> None:
    """Whole and streamed text end before a stop string:"""
    assert isinstance(row, Callable)
    text = plain(target)
    stops = row(text)
    whole = target.post_completion(max_tokens=LENGTH, stop=stops).json["choices"][0]
    events = completion_events(target, max_tokens=LENGTH, stop=stops)
    assert whole["text"] in {expected(text, stops), expected(text, stops[::-1])}, (whole["text"], text, stops)
    assert "".join(choice["text"] for choice in choices_of(events)) == whole["text"]
    if any(stop in text for stop in stops):
        assert whole["finish_reason"] == "stop"
        assert choices_of(events)[-1]["finish_reason"] == "stop"


@check
def a_stop_that_is_a_text(target: Target) -> None:
    """stop may be a text instead of a list."""
    text = plain(target)
    fields = {"max_tokens": LENGTH}
    one = target.post_completion(stop=text[10:13], **fields).json["choices"][0]["text"]
    assert one == target.post_completion(stop=[text[10:13]], **fields).json["choices"][0]["text"]


@check
def an_empty_list_of_stops(target: Target) -> None:
    """stop: [] stops nothing."""
    assert target.post_completion(max_tokens=LENGTH, stop=[]).json["choices"][0]["text"] == plain(target)


@check
def a_stop_in_the_last_token(target: Target) -> None:
    """A stop string in the token that reaches the limit counts as stop."""
    for limit in range(2, LENGTH):
        text = target.post_completion(max_tokens=limit).json["choices"][0]["text"]
        shorter = target.post_completion(max_tokens=limit - 1).json["choices"][0]["text"]
        last = text[len(shorter) :].strip()
        if last and last not in shorter:
            choice = target.post_completion(max_tokens=limit, stop=[last]).json["choices"][0]
            assert choice["finish_reason"] == "stop", choice
            assert choice["text"] == text[: text.index(last)], (choice["text"], text)
            return
    raise AssertionError("no token is new")


@check
def a_stop_in_a_chat(target: Target) -> None:
    """A chat ends before a stop string, streamed too."""
    content = target.chat(max_completion_tokens=LENGTH).choices[0].message.content
    stop = content[len(content) // 2 :][:2]
    choice = target.chat(max_completion_tokens=LENGTH, stop=stop).choices[0]
    assert choice.message.content == content[: content.index(stop)]
    assert choice.finish_reason == "stop"
    chunks = target.chat(max_completion_tokens=LENGTH, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


@check
def the_usage_counts_the_stop(target: Target) -> None:
    """The usage counts the tokens that were generated, those of the stop string included."""
    text = plain(target)
    body = target.post_completion(max_tokens=LENGTH, stop=[text[0]]).json
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] >= 1
