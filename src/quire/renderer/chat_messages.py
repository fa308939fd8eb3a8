"""A chat as a template wants it: plain data, in the shape that this template reads.

Clients write `content` as a text or as a list of parts, and arguments of a tool call as a JSON string; templates differ
in which of these they understand. Never changes the caller's messages. Called by ChatTemplates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError

Message = dict[str, Any]
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
# One name for what a model thought; templates read the first, gpt-oss reads `thinking`.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 64


def prepare_messages(chat: Sequence[Mapping[str, Any]], *, as_parts: bool, keeps_parts: bool) -> list[Message]:
    """as_parts: the template reads lists only. keeps_parts: it reads lists as well as texts."""
    if isinstance(chat, (str, bytes, Mapping)) or not isinstance(chat, Sequence) or not chat:
        raise RequestError(
            'messages: must be a list of at least one message such as {"role": "user", "content": "Hello"}.',
            param="messages",
        )
    messages = []
    for number, given in enumerate(chat):
        where = f"messages[{number}]"
        message = plain(given, where)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f'{where}: must be an object with a "role" that is a text.', param=where)
        if "content" in message:
            message["content"] = _content(message["content"], where, as_parts=as_parts, keeps_parts=keeps_parts)
        if message.get("tool_calls"):
            message["tool_calls"] = [_tool_call(call, where) for call in _list_of_calls(message["tool_calls"], where)]
        messages.append(_with_reasoning(message))
    return messages


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON's own types: templates see nothing that has methods of its own."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth >= _MAX_DEPTH:
        raise RequestError(f"{where}: nested more than {_MAX_DEPTH} levels deep.", param=where)
    if isinstance(value, Mapping):
        return {str(key): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where, depth + 1) for item in value]
    if callable(getattr(value, "model_dump", None)):
        # messages as the official client returns them
        return plain(value.model_dump(exclude_none=True), where, depth + 1)
    raise RequestError(f"{where}: a {type(value).__name__} is no JSON value.", param=where)


def _content(content: Any, where: str, *, as_parts: bool, keeps_parts: bool) -> Any:
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        if as_parts or keeps_parts:
            return parts
        return "\n".join(part["text"] for part in parts)
    if content is not None and not isinstance(content, str):
        raise RequestError(f"{where}.content: must be a text or a list of parts.", param=f"{where}.content")
    return [{"type": "text", "text": content}] if as_parts and content is not None else content


def _part(part: Any, where: str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where}: type={kind!r} is not supported, this model is served with text only.", param=where
        )
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if not isinstance(text, str):
        raise RequestError(f'{where}: needs a "text".', param=where)
    return {"type": "text", "text": text}


def _list_of_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls: must be a list.", param=f"{where}.tool_calls")
    return calls


def _tool_call(call: Any, where: str) -> Any:
    """OpenAI writes the arguments as a string of JSON, templates want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise RequestError(
            f"{where}.tool_calls: arguments of {function.get('name')!r} are no JSON ({error}).",
            param=f"{where}.tool_calls",
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: Message) -> Message:
    thought = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}
