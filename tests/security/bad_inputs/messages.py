"""Chats that are none."""

from __future__ import annotations

from typing import Any

from .case import Case, chat, shown

_USER = {"role": "user", "content": "Hi"}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

_MESSAGES: dict[str, Any] = {
    "none": [],
    "no role": [{"content": "Hi"}],
    "role null": [{"role": None, "content": "Hi"}],
    "role a number": [{"role": 1, "content": "Hi"}],
    "role a list": [{"role": ["user"], "content": "Hi"}],
    "unknown role": [{"role": "root", "content": "Hi"}],
    "role in capitals": [{"role": "USER", "content": "Hi"}],
    "role with a space": [{"role": "user ", "content": "Hi"}],
    "empty role": [{"role": "", "content": "Hi"}],
    "no content": [{"role": "user"}],
    "content null": [{"role": "user", "content": None}],
    "content a number": [{"role": "user", "content": 5}],
    "content true": [{"role": "user", "content": True}],
    "content an object": [{"role": "user", "content": {"text": "Hi"}}],
    "a part that is a number": [{"role": "user", "content": [1]}],
    "a part that is null": [{"role": "user", "content": [None]}],
    "a part without type": [{"role": "user", "content": [{"text": "Hi"}]}],
    "a part of unknown type": [{"role": "user", "content": [{"type": "poem", "poem": "x"}]}],
    "a part whose type is a list": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
    "a text part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a text part of null": [{"role": "user", "content": [{"type": "text", "text": None}]}],
    "a text part of a number": [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    "a text part of a list": [{"role": "user", "content": [{"type": "text", "text": ["a"]}]}],
    "a list in a list": [{"role": "user", "content": [[{"type": "text", "text": "x"}]]}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
    "sound": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    "a video": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://127.0.0.1/x"}}]}],
    "a file": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}],
    "a refusal that is a number": [_USER, {"role": "assistant", "refusal": 5}],
    "tool without content": [_USER, {"role": "tool", "tool_call_id": "a"}],
    "tool with a number as id": [_USER, {"role": "tool", "content": "x", "tool_call_id": 5}],
    "calls that are no list": [_USER, {"role": "assistant", "tool_calls": {}}],
    "calls that are a text": [_USER, {"role": "assistant", "tool_calls": "x"}],
    "a call that is null": [_USER, {"role": "assistant", "tool_calls": [None]}],
    "a call without function": [_USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
    "a call whose function is a text": [
        _USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": "f"}]}
    ],
    "a call without a name": [
        _USER, {"role": "assistant", "tool_calls": [{**_CALL, "function": {"arguments": "{}"}}]}
    ],
    "a call whose arguments are a number": [
        _USER, {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": 5}}]}
    ],
    "a call whose arguments are a list": [
        _USER, {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": [1]}}]}
    ],
    "a call whose arguments are no JSON": [
        _USER, {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": "{x"}}]}
    ],
    "a call whose arguments are code": [
        _USER,
        {"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f", "arguments": "__import__('os')"}}]},
    ],
    "an assistant that says nothing": [_USER, {"role": "assistant"}],
    "4,097 messages": [_USER] * 4097,
    "100,000 empty messages": [{}] * 100_000,
    "a message that is a list": [["user", "Hi"]],
    "one good and one bad": [_USER, {"role": "user"}],
    "a name that is an object": [{"role": "user", "content": "Hi", "name": {"a": 1}}],
    "too long in parts": [{"role": "user", "content": [{"type": "text", "text": "word "}] * 3000}],
    "too long in many": [{"role": "user", "content": "word " * 20}] * 400,
    "a deep content": [{"role": "user", "content": [{"type": "text", "text": {"a": {"b": {"c": []}}}}]}],
}  # fmt: skip

CASES: list[Case] = [chat(name, messages=messages) for name, messages in _MESSAGES.items()]
CASES += [
    chat(f"{name}={shown(value)}", **{name: value})
    for name, value in (
        ("chat_template", "{{ 7 * 7 }}"),
        ("chat_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        ("chat_template", "{% for i in range(10**9) %}x{% endfor %}"),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("chat_template_kwargs", "x"),
        ("documents", [{"text": "x"}]),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
    )
]
