"""A chat, checked, as a template wants it: plain data, in the shape that this template reads. For all interfaces.

Clients write `content` as a text or as a list of parts, and arguments of a tool call as a JSON string; templates differ
in which of these they understand. Never changes the caller's messages. Called by ChatTemplates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError

Message = dict[str, Any]
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
# One name for what a model thought; templates read the first, gpt-oss reads `thinking`, a few the last.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_TEXTS = ("name", "tool_call_id", "refusal")
# What clients put beside a text, in a message or in a part of one. Left out in silence the answer would be another one.
MEDIA = ("image", "images", "image_url", "audio", "audios", "audio_url", "input_audio", "video", "videos", "video_url")
_ALLOWED = "texts, and image_url or video_url where the model sees these"
_SEEN = ("image", "video")
_MAX_DEPTH = 64
MAX_MESSAGES = 4096
# of a role that the template does not know, but writes down
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_ -]{0,63}")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What a template reads."""

    # contents that are lists only, or lists as well as texts
    as_parts: bool = False
    keeps_parts: bool = False
    # OpenAI put the role in the place of system; few templates know it
    knows_developer: bool = False
    # it writes down whatever a role is called
    knows_any_role: bool = False
    # it asks whether a content is none; in others that would be printed
    knows_none: bool = False
    # thoughts have this name there, and no other
    reads_reasoning: bool = False
    # it writes a call's arguments down as they come, so they must be JSON already
    joins_arguments: bool = False
    # {"type": "image"} stands where an image was, or "video"; the template writes their marks
    takes_images: bool = False


def prepare_messages(chat: Sequence[Mapping[str, Any]], dialect: Dialect) -> list[Message]:
    """Messages for the template, or RequestError that names the place."""
    if isinstance(chat, (str, bytes, Mapping)) or not isinstance(chat, Sequence) or not chat:
        raise RequestError(
            'messages: must be a list of at least one message such as {"role": "user", "content": "Hello"}.',
            param="messages",
        )
    if len(chat) > MAX_MESSAGES:
        raise RequestError(f"messages: {len(chat)} messages, at most {MAX_MESSAGES} are allowed.", param="messages")
    return [_message(given, f"messages[{number}]", dialect) for number, given in enumerate(chat)]


def _message(given: object, where: str, dialect: Dialect) -> Message:
    message = plain(given, where)
    if not isinstance(message, dict):
        raise RequestError(f'{where}: must be an object with a "role" and a "content".', param=where)
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES and not (dialect.knows_any_role and isinstance(role, str) and _ROLE.fullmatch(role)):
        raise RequestError(
            f"{where}.role: must be one of {', '.join(ROLES)}, not {str(role)[:60]!r}.", param=f"{where}.role"
        )
    if content is None and (role != "assistant" or not _says_something(message)):
        raise RequestError(f"{where}.content: this field is required.", param=f"{where}.content")
    _check_no_media(message, where)
    for name in _TEXTS:
        if not isinstance(message.get(name), str | None):
            raise RequestError(f"{where}.{name}: must be a text.", param=f"{where}.{name}")
    # what a client leaves open as null is as good as not there
    kept = {"content"} if dialect.knows_none else set()
    message = {name: value for name, value in message.items() if value is not None or name in kept}
    if role == "developer" and not dialect.knows_developer:
        message["role"] = "system"
    if content is not None:
        message["content"] = _content(content, where, dialect)
    if message.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls", dialect)
    return _with_reasoning(message, dialect)


def _says_something(message: Message) -> bool:
    """Without a content: it calls, or it thought."""
    return any(message.get(name) for name in ("tool_calls", "refusal", *_REASONING_NAMES))


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
    raise RequestError(
        f"{where}: {type(value).__name__} is no type of JSON. Give texts, numbers, lists and objects; images go "
        "only to models that see them.",
        param=where,
    )


def _content(content: Any, where: str, dialect: Dialect) -> Any:
    if isinstance(content, list):
        parts = [_part(part, f"{where}.content[{number}]", dialect) for number, part in enumerate(content)]
        if dialect.as_parts or dialect.keeps_parts:
            return parts
        if any(part["type"] in _SEEN for part in parts):
            raise RequestError(
                f"{where}.content: this model's chat template has no place for images and videos. Start the "
                "engine with chat_template=FILE.",
                param=f"{where}.content",
            )
        return "\n".join(part["text"] for part in parts)
    if not isinstance(content, str):
        raise RequestError(f"{where}.content: must be a text or a list of parts.", param=f"{where}.content")
    return [{"type": "text", "text": content}] if dialect.as_parts else content


def _part(part: Any, where: str, dialect: Dialect) -> dict[str, str]:
    if dialect.takes_images and isinstance(part, dict) and part.keys() == {"type"} and part["type"] in _SEEN:
        return {"type": part["type"]}
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(
            f"{where}: type {str(kind)[:40]!r} is not supported. Allowed are {_ALLOWED}.",
            param=f"{where}.type",
        )
    _check_no_media(part, where)
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text: must be a text.", param=f"{where}.text")
    return {"type": "text", "text": text}


def _check_no_media(given: Message, where: str) -> None:
    for name in MEDIA:
        if given.get(name):
            raise RequestError(
                f"{where}.{name}: not supported here. Allowed in a list of parts are {_ALLOWED}.",
                param=f"{where}.{name}",
            )


def _tool_calls(calls: Any, where: str, dialect: Dialect) -> list[Any]:
    """OpenAI writes the arguments as a string of JSON, most templates want the object."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}: must be a list.", param=where)
    return [_tool_call(call, f"{where}[{number}]", dialect) for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str, dialect: Dialect) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function: must be an object with a name.", param=f"{where}.function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        place = f"{where}.function.arguments"
        raise RequestError(f"{place}: must be a JSON object, or one written as a string.", param=place)
    if dialect.joins_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: Message, dialect: Dialect) -> Message:
    thought = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if thought is None:
        return message
    named = {"thinking": thought, **message, "reasoning_content": thought}
    return {**named, "reasoning": thought} if dialect.reads_reasoning else named
