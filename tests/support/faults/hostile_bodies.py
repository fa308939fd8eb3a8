"""Bodies that take long to read: up to the limit of size, for every route that takes one, each from its seed alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

# of a body of JSON (`max_text_body_bytes`)
_MOST_BYTES = 8 << 20
_SIZES = (1_000, 30_000, 300_000, _MOST_BYTES - 1_000)
_MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
# what a request of the route needs besides
_BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/v1/embeddings": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/sessions": {"messages": _MESSAGES},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
# many log-probabilities, which become JSON when all is there
_LARGE_ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"n": 128, "max_tokens": 100, "ignore_eos": True, "logprobs": 20},
    "/v1/chat/completions": {"n": 128, "max_tokens": 100, "ignore_eos": True, "logprobs": True, "top_logprobs": 20},
}
_SHARE_OF_LARGE_ANSWERS = 0.002
_FIELDS = (
    "stop", "logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "metadata", "user", "tools", "prompt",
    "messages", "input", "tokens", "chat_template_kwargs", "guided_choice", "guided_json", "temperature", "zzz", "seed",
    "logprobs", "response_format", "documents", "stream_options", "model", "tool_choice", "prompt_cache_key", "suffix",
)  # fmt: skip


def _names(size: int, chosen: random.Random) -> str:
    start = chosen.choice(("zq", "tempera", "max_token", "", "é"))
    return "{" + ",".join(f'"{start}{number}":{number}' for number in range(size // 16 + 1)) + "}"


def _same_name(size: int, chosen: random.Random) -> str:
    return "{" + ",".join(['"role":1'] * (size // 9 + 1)) + "}"


def _repeated(*elements: str) -> Callable[[int, random.Random], str]:
    def make(size: int, chosen: random.Random) -> str:
        element = chosen.choice(elements)
        return "[" + ",".join([element] * (size // (len(element) + 1) + 1)) + "]"

    return make


def _deep(size: int, chosen: random.Random) -> str:
    opened, closed = chosen.choice((("[", "]"), ('{"a":', "}")))
    depth = size // (len(opened) + 1) + 1
    return opened * depth + "1" + closed * depth


def _text(size: int, chosen: random.Random) -> str:
    letter = chosen.choice(("a", "é", "\\u00e9", "\\n", "😀", "\\ud83d\\ude00", "\\ud800", " ", "<|end|>", '\\"'))
    return '"' + letter * (size // len(letter.encode()) + 1) + '"'


def _many_texts(size: int, chosen: random.Random) -> str:
    """As many as an endpoint takes, each so short that it is no work for a thread."""
    count = chosen.choice((256, 2048))
    text = chosen.choice(("word ", "a", "é ", "1")) * (min(1_900, size // count) // 5)
    return "[" + ",".join([json.dumps(text)] * count) + "]"


def _number(size: int, chosen: random.Random) -> str:
    return chosen.choice(("", "-", "0.", "1e", "1e-")) + "1" * (size + 1)


_VALUES: tuple[Callable[[int, random.Random], str], ...] = (
    _names,
    _same_name,
    _repeated("1", "-0.5", "1e999", "null", "true"),
    _repeated('"a"', '"éé"', '""'),
    _repeated("[]", "{}", "[[]]", '[{"a":[]}]', "[1]"),
    _repeated('{"role":"user","content":"hi"}', '{"role":"user","content":"hi","x":1}', '{"role":"tool"}'),
    _repeated('{"type":"function","function":{"name":"f"}}', '{"type":"text","text":"a"}'),
    _deep,
    _text,
    _many_texts,
    _number,
)


def body_of(seed: int, paths: Sequence[str]) -> tuple[str, bytes]:
    """A route, and what is sent to it."""
    chosen = random.Random(seed)
    if chosen.random() < _SHARE_OF_LARGE_ANSWERS:
        path = chosen.choice(tuple(_LARGE_ANSWERS))
        return path, json.dumps({**_BASES[path], **_LARGE_ANSWERS[path]}).encode()
    path = chosen.choice(paths)
    base = dict(_BASES.get(path, {"messages": _MESSAGES}))
    field = chosen.choice(_FIELDS)
    base.pop(field, None)
    size = int(chosen.choice(_SIZES) * chosen.random())
    value = chosen.choice(_VALUES)(size, chosen)
    if chosen.random() < 0.15:
        # inside of a message
        base["messages"] = "MESSAGE"
        inner = json.dumps({"role": "user", "content": "hi"})[:-1] + f', "{field}": {value}}}'
        text = json.dumps(base).replace('"MESSAGE"', f"[{inner}]")
    elif chosen.random() < 0.15 and value.startswith("{"):
        # names of the request itself
        text = json.dumps(base)[:-1] + ", " + value[1:]
    else:
        text = json.dumps(base)[:-1] + f', "{field}": {value}}}'
    data = text.encode()
    if chosen.random() < 0.1:
        # what comes by accident: an end that is missing, or bytes that are no text
        place = chosen.randrange(len(data))
        data = data[:place] + chosen.choice((b"", b"\xff\xfe", b"\x00", b'"')) + data[place + 1 :]
    return path, data[:_MOST_BYTES]
