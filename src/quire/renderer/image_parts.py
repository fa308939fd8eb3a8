"""Images among the parts of a chat: what stands for them, where they stand, and the chat without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError

# What a client writes in a message, and under which name the image stands there.
_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
# How closely to look; the numbers of the model's own processor decide that here.
_DETAILS = ("auto", "low", "high", "original")
# What stands behind URLs, by URL.
NOTHING_FETCHED: Mapping[str, bytes] = {}


class ImagePart(dict[str, Any]):
    """A part that was translated from another dialect: errors speak of the place where the client wrote it."""

    def __init__(self, part: Mapping[str, Any], place: str) -> None:
        super().__init__(part)
        self.place = place


def placed(images: Sequence[Any]) -> list[tuple[Any, str]]:
    """Images that come beside a prompt, with their places."""
    return [(image, f"multi_modal_data.image[{number}]") for number, image in enumerate(images)]


def take_images(chat: Any) -> tuple[Any, list[tuple[Any, str]]]:
    """The chat with a bare {"type": "image"} for each image; the images in their order, and the place of each."""
    if not isinstance(chat, Sequence) or isinstance(chat, str | bytes):
        return chat, []
    sources: list[tuple[Any, str]] = []
    return [_without(message, f"messages[{number}]", sources) for number, message in enumerate(chat)], sources


def _without(message: Any, where: str, sources: list[tuple[Any, str]]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _PARTS:
            parts.append(part)
            continue
        place = part.place if isinstance(part, ImagePart) else f"{where}.content[{number}].{_PARTS[kind]}"
        sources.append((_source(part, part.get(_PARTS[kind]), place), place))
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], given: Any, place: str) -> Any:
    if isinstance(given, Mapping):
        part = given
        given = given.get("url")
    detail = part.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise RequestError(
            f"{place}: detail={str(detail)[:40]!r}: must be one of {', '.join(_DETAILS)}; the model's own numbers "
            "decide how closely it looks.",
            param=place,
        )
    if given is None:
        raise RequestError(f"{place}: this field is required; it holds the image.", param=place)
    return given
