"""Items of a conversation: as clients send them, as they are stored, and as the messages of a chat.

An item is checked once, where it comes in; what is stored is in one form, with an id for each. An assistant's turn is
several items (a thought, a text, calls) and one message.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.server.wire.field_rules import text_in
from quire.renderer.image_parts import ImagePart

Item = dict[str, Any]
MAX_ITEMS = 4096
_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


# ------------------------------------------------------------------------------------------ from a client


def items_of(given: str | Sequence[Any] | None, *, sees_images: bool = False) -> list[Item]:
    """Raises ApiError that names the place."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input", sees_images)]
    if len(given) > MAX_ITEMS:
        raise invalid(f"input: {len(given)} items, at most {MAX_ITEMS} are allowed.", "input")
    return [_item(item, f"input[{number}]", sees_images) for number, item in enumerate(given)]


def _item(item: Any, where: str, sees_images: bool) -> Item:
    if not isinstance(item, dict):
        raise invalid(f'{where}: must be an object such as {{"role": "user", "content": "Hello"}}.', where)
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    match kind:
        case "message":
            return _message(item, where, sees_images)
        case "function_call":
            return _call(item, where)
        case "function_call_output":
            return _call_output(item, where)
        case "reasoning":
            return _reasoning(item, where)
    allowed = ", ".join(_TYPES)
    raise invalid(f"{where}.type={str(kind)[:40]!r}: not supported: items are one of {allowed}.", f"{where}.type")


def _message(item: Item, where: str, sees_images: bool) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role: must be one of {', '.join(_ROLES)}, not {str(role)[:60]!r}.", f"{where}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    takes_images = sees_images and role == "user"
    content = _parts(kind, item.get("content"), f"{where}.content", takes_images)
    return {
        "id": _given_id(item, where) or item_id("msg"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _parts(kind: str, content: Any, where: str, takes_images: bool) -> list[Item]:
    parts = content if isinstance(content, list) else [content]
    if not takes_images or not any(_is_image(part) for part in parts):
        return [_text_part(kind, text) for text in _texts(content, where)]
    return [
        _image_part(part, f"{where}[{number}]")
        if _is_image(part)
        else _text_part(kind, _text(part, f"{where}[{number}]"))
        for number, part in enumerate(parts)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image_part(part: Item, where: str) -> Item:
    if part.get("file_id") is not None:
        raise invalid(f"{where}.file_id: images are not read from files. Send a data URL.", f"{where}.file_id")
    url = text_in(part, "image_url", where)
    image = {"type": "input_image", "image_url": url, "detail": str(part.get("detail") or "auto")[:16]}
    return ImagePart(image, f"{where}.image_url")


def _text_part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise invalid(f"{where}: must be a text or a list of parts.", where)
    return [_text(part, f"{where}[{number}]") for number, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        allowed = "texts, and input_image of a user where the model sees images"
        raise invalid(f"{where}: type {str(kind)[:40]!r} is not supported. Allowed are {allowed}.", f"{where}.type")
    name = "refusal" if kind == "refusal" else "text"
    return text_in(part, name, where)


def _call(item: Item, where: str) -> Item:
    return {
        "id": _given_id(item, where) or item_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": text_in(item, "call_id", where),
        "name": text_in(item, "name", where),
        "arguments": text_in(item, "arguments", where),
    }


def _call_output(item: Item, where: str) -> Item:
    output = item.get("output")
    return {
        "id": _given_id(item, where) or item_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": text_in(item, "call_id", where),
        "output": output if isinstance(output, str) else "\n".join(_texts(output, f"{where}.output")),
    }


def _reasoning(item: Item, where: str) -> Item:
    content = item.get("content") or []
    if item.get("encrypted_content") and not content:
        text = "it was encrypted elsewhere and cannot be read here. Leave the item out"
        raise invalid(f"{where}.encrypted_content: {text}.", f"{where}.encrypted_content")
    if not isinstance(content, list):
        raise invalid(f"{where}.content: must be a list of parts.", f"{where}.content")
    texts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        if not isinstance(part, dict) or part.get("type") != "reasoning_text":
            raise invalid(f"{place}.type: must be reasoning_text.", f"{place}.type")
        texts.append({"type": "reasoning_text", "text": text_in(part, "text", place)})
    return {
        "id": _given_id(item, where) or item_id("rs"),
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": texts,
    }


def _given_id(item: Item, where: str) -> str | None:
    value = item.get("id")
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= 128):
        raise invalid(f"{where}.id: must be a text of 1 to 128 characters.", f"{where}.id")
    return value


# ------------------------------------------------------------------------------------------ to a chat


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """System messages at the beginning become one: most templates know one only."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _turn(messages, has_content=True)["content"] = "".join(part["text"] for part in item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _content(item)})
            case "reasoning":
                text = "".join(part["text"] for part in item["content"])
                if text:
                    _turn(messages, has_reasoning=True)["reasoning_content"] = text
            case "function_call":
                call = {"name": item["name"], "arguments": item["arguments"]}
                calls = _turn(messages).setdefault("tool_calls", [])
                calls.append({"id": item["call_id"], "type": "function", "function": call})
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    if not messages or not items:
        raise _no_input()
    return _with_one_system(messages)


def _content(item: Item) -> Any:
    parts = [
        part if part["type"] == "input_image" else {"type": "text", "text": part["text"]} for part in item["content"]
    ]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _turn(messages: list[dict[str, Any]], *, has_content: bool = False, has_reasoning: bool = False) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one, unless it has gone on too far."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant" and not (
        (has_content and (last["content"] is not None or "tool_calls" in last))
        or (has_reasoning and (last["content"] is not None or "tool_calls" in last or "reasoning_content" in last))
    )
    if not is_open:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = 0
    while count < len(messages) and messages[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return messages
    joined = "\n\n".join(_joined(message["content"]) for message in messages[:count])
    return [{"role": "system", "content": joined}, *messages[count:]]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _no_input() -> ApiError:
    return invalid("input: this field is required: a text, or at least one item.", "input")


def turns_of(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where a conversation may be cut: before each message of the user but the first one."""
    begins = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return begins[1:]
