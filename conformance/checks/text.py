"""Text in streams: whole characters, nothing lost, nothing of the prompt."""

from __future__ import annotations

from conformance.checks.streams import choices_of, completion_events
from conformance.registry import check_each
from conformance.target import Target

WORLD: dict[str, object] = {
    "emoji joined with ZWJ": "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "Chinese": "你好，世界",
    "Thai": "สวัสดีชาวโลก",
    "Korean": "안녕하세요",
    "Arabic": "مرحبا بالعالم",
    "combining marks": "e\u0302\u0300 n\u0303",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",
    "spaces at the start": "   three",
    "line ends": "a\r\n\nb\u2028c",
    "a NUL": "a\u0000b",
}


@check_each(WORLD)
def an_echo(target: Target, row: object) -> None:
    """echo gives the prompt back, whole and streamed:"""
    fields = {"prompt": row, "echo": True, "max_tokens": 1}
    whole = target.post_completion(**fields).json["choices"][0]["text"]
    assert whole.startswith(str(row)), whole
    assert "".join(choice["text"] for choice in choices_of(completion_events(target, **fields))) == whole


@check_each(WORLD)
def a_stream_after(target: Target, row: object) -> None:
    """A sampled stream is the whole text, and holds nothing of the prompt:"""
    fields = {"prompt": row, "max_tokens": 24, "temperature": 2.0, "seed": 9}
    whole = target.post_completion(**fields).json["choices"][0]["text"]
    pieces = [choice["text"] for choice in choices_of(completion_events(target, **fields))]
    assert "".join(pieces) == whole
    # also valid in UTF-8: no half of a pair of surrogates
    assert whole.encode()
    assert not whole.startswith(str(row))
