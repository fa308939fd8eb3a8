"""Images and videos among the parts of a chat: what stands for them, where they stand, and the chat without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError

# What a client writes in a message: what it is, and under which name it stands there.
_PARTS = {
    "image_url": ("image", "image_url"),
    "input_image": ("image", "image_url"),
    "image": ("image", "image"),
    "video_url": ("video", "video_url"),
    "video": ("video", "video"),
}
# How closely to look; the numbers of the model's own processor decide that here.
_DETAILS = ("auto", "low", "high", "original")
# What stands behind URLs, by URL.
NOTHING_FETCHED: Mapping[str, bytes] = {}

Source = tuple[Any, str]


class ImagePart(dict[str, Any]):
    """A part that was translated from another dialect: errors speak of the place where the client wrote it."""

    def __init__(self, part: Mapping[str, Any], place: str) -> None:
        super().__init__(part)
        self.place = place


@dataclass
class Sources:
    """Images and videos, each kind in its order, with their places."""

    images: list[Source] = field(default_factory=list)
    videos: list[Source] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos)

    def fetched(self, content: Mapping[str, bytes]) -> Sources:
        """With what stands behind their URLs."""
        if not content:
            return self
        images, videos = (
            [(content.get(given, given) if isinstance(given, str) else given, where) for given, where in sources]
            for sources in (self.images, self.videos)
        )
        return Sources(images, videos)


def placed(images: Sequence[Any], videos: Sequence[Any] = ()) -> Sources:
    """Those that come beside a prompt."""
    return Sources(
        *(
            [(given, f"multi_modal_data.{kind}[{number}]") for number, given in enumerate(many)]
            for kind, many in (("image", images), ("video", videos))
        )
    )


def take_media(chat: Any) -> tuple[Any, Sources]:
    """The chat with a bare {"type": "image"} or {"type": "video"} for each of them, and these."""
    sources = Sources()
    if not isinstance(chat, Sequence) or isinstance(chat, str | bytes):
        return chat, sources
    return [_without(message, f"messages[{number}]", sources) for number, message in enumerate(chat)], sources


def _without(message: Any, where: str, sources: Sources) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for number, part in enumerate(content):
        written = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(written, str) or written not in _PARTS:
            parts.append(part)
            continue
        kind, name = _PARTS[written]
        place = part.place if isinstance(part, ImagePart) else f"{where}.content[{number}].{name}"
        of_kind = sources.images if kind == "image" else sources.videos
        of_kind.append((_source(part, part.get(name), place, kind), place))
        parts.append({"type": kind})
    return {**message, "content": parts}


def _source(part: Mapping[str, Any], given: Any, place: str, kind: str) -> Any:
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
        raise RequestError(f"{place}: this field is required; it holds the {kind}.", param=place)
    return given
