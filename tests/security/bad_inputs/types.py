"""Each field with values of other types than its own."""

from __future__ import annotations

from typing import Any

from .case import Case, chat, completion, shown

_BIG = [2**63, 2**64, -(2**63) - 1, 10**30]
# values that no field of this kind takes
_WRONG: dict[str, list[Any]] = {
    "whole number": ["", "1", [], {}, True, 1.5, *_BIG],
    "number": ["", "1", [], {}, True],
    "switch": ["", "true", [], {}, 1, 1.5],
    "text": [[], {}, True, 1, 1.5],
    "list of texts": ["", {}, True, 1, [1], [None], [["a"]]],
    "object": ["", "x", [], True, 1],
}
_FIELDS = {
    "n": "whole number",
    "top_k": "whole number",
    "min_tokens": "whole number",
    "prompt_logprobs": "whole number",
    "priority": "whole number",
    "temperature": "number",
    "top_p": "number",
    "min_p": "number",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "repetition_penalty": "number",
    "stream": "switch",
    "ignore_eos": "switch",
    "skip_special_tokens": "switch",
    "add_special_tokens": "switch",
    "include_stop_str_in_output": "switch",
    "model": "text",
    "cache_salt": "text",
    "guided_regex": "text",
    "bad_words": "list of texts",
    "guided_choice": "list of texts",
    "stream_options": "object",
    "response_format": "object",
    "structured_outputs": "object",
    "logit_bias": "object",
}


def _allowed(name: str, value: Any) -> bool:
    # an empty list of words forbids nothing, and one log-probability may be asked for by yes
    return (name == "bad_words" and value == []) or (name == "prompt_logprobs" and value is True)


CASES: list[Case] = [
    (chat if number % 2 else completion)(f"{name}={shown(value)}", **{name: value})
    for name, kind in _FIELDS.items()
    for number, value in enumerate(_WRONG[kind])
    if not _allowed(name, value)
]
CASES += [completion(f"prompt={shown(value)}", prompt=value) for value in (None, True, 1, 1.5, {}, [{}], [None], [1.5])]
CASES += [
    chat(f"messages={shown(value)}", messages=value) for value in (None, "", "x", True, 1, {}, [None], ["x"], [1])
]
CASES += [chat(f"tools={shown(value)}", tools=value) for value in ("", "x", True, 1, {}, [None], ["x"], [1])]
CASES += [chat(f"tool_choice={shown(value)}", tool_choice=value) for value in ("", "x", True, 1, 1.5, [], {}, [1])]
