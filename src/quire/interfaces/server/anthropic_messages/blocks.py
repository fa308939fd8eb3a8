"""Messages made of blocks, as the messages of a chat. Raises ApiError that names the place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.interfaces.server.wire.errors import invalid
from quire.interfaces.server.wire.field_rules import text_in
from quire.renderer.image_parts import ImagePart

Block = dict[str, Any]
_OF_USER = "text, tool_result"
_OF_ASSISTANT = "text, thinking, tool_use"


def messages_of(
    system: str | list[Any] | None, messages: Sequence[Any], *, sees_images: bool = False
) -> list[dict[str, Any]]:
    if not messages:
        raise invalid("messages: at least one message is required.", "messages")
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": _text_only(system, "system")})
    for number, message in enumerate(messages):
        found += _of_message(message, f"messages[{number}]", sees_images)
    return found


def _of_message(message: Any, where: str, sees_images: bool) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    match role:
        case "system":
            return [{"role": "system", "content": _text_only(content, f"{where}.content")}]
        case "user":
            return _of_user(_blocks(content, f"{where}.content"), f"{where}.content", sees_images)
        case "assistant":
            return [_of_assistant(_blocks(content, f"{where}.content"), f"{where}.content")]
    text = "must be an object with a role (user or assistant) and a content"
    raise invalid(f"{where}: {text}.", where)


def _blocks(content: Any, where: str) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}: must be a text or a list of blocks.", where)
    for number, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{where}[{number}]: must be an object with a type.", f"{where}[{number}]")
    return content


def _text_only(content: Any, where: str) -> str:
    """Blocks of text, one a line."""
    texts = []
    for number, block in enumerate(_blocks(content, where)):
        if block.get("type") != "text":
            raise _unsupported(block, f"{where}[{number}]", "text")
        texts.append(text_in(block, "text", f"{where}[{number}]"))
    return "\n".join(texts)


def _of_user(blocks: list[Block], where: str, sees_images: bool) -> list[dict[str, Any]]:
    """Results of tools are messages of their own; texts between them belong together."""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        match block.get("type"):
            case "image" if not sees_images:
                raise _unsupported(block, place, _OF_USER)
            case "text" | "image":
                part = _image(block, place) if block["type"] == "image" else _text(block, place)
                if found and found[-1]["role"] == "user":
                    found[-1]["content"].append(part)
                else:
                    found.append({"role": "user", "content": [part]})
            case "tool_result":
                found.append(_of_result(block, place))
            case _:
                raise _unsupported(block, place, _OF_USER)
    for message in found:
        if message["role"] == "user" and len(message["content"]) == 1:
            (part,) = message["content"]
            message["content"] = part["text"] if part["type"] == "text" else [part]
    return found or [{"role": "user", "content": ""}]


def _text(block: Block, where: str) -> dict[str, Any]:
    return {"type": "text", "text": text_in(block, "text", where)}


def _image(block: Block, where: str) -> dict[str, Any]:
    """As a chat has it."""
    given = block.get("source")
    source = given if isinstance(given, dict) else {}
    where = f"{where}.source"
    match source.get("type"):
        case "base64":
            url = f"data:{text_in(source, 'media_type', where)};base64,{text_in(source, 'data', where)}"
        case "url":
            url = text_in(source, "url", where)
        case _:
            text = 'must be {"type": "base64", "media_type": ..., "data": ...} or {"type": "url", "url": ...}'
            raise invalid(f"{where}: {text}.", where)
    return ImagePart({"type": "image_url", "image_url": {"url": url}}, where)


def _of_result(block: Block, where: str) -> dict[str, Any]:
    content = _text_only(block.get("content", ""), f"{where}.content")
    if block.get("is_error"):
        # a chat has no field for it, and the model must know
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": text_in(block, "tool_use_id", where), "content": content}


def _of_assistant(blocks: list[Block], where: str) -> dict[str, Any]:
    texts = []
    thoughts = []
    calls = []
    for number, block in enumerate(blocks):
        place = f"{where}[{number}]"
        match block.get("type"):
            case "text":
                texts.append(text_in(block, "text", place))
            case "thinking":
                thoughts.append(text_in(block, "thinking", place))
            case "tool_use":
                calls.append(_of_call(block, place))
            case _:
                raise _unsupported(block, place, _OF_ASSISTANT)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _of_call(block: Block, where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.input: must be an object.", f"{where}.input")
    function = {"name": text_in(block, "name", where), "arguments": arguments}
    return {"id": text_in(block, "id", where), "type": "function", "function": function}


def _unsupported(block: Block, where: str, allowed: str) -> Exception:
    kind = str(block.get("type"))[:40]
    text = f"not supported here: allowed are {allowed}, and image of a user where the model sees images"
    return invalid(f"{where}.type={kind!r}: {text}.", f"{where}.type")
