"""Requests with images that were made to hurt, or were spoilt on the way, in each dialect; each from its seed alone."""

from __future__ import annotations

import random
from typing import Any

from tests.support.image_bombs import BOMBS, ODD, bomb, data_url, spoilt

from quire.renderer.images import MOST_BYTES

_SHARE_OF_BOMBS = 0.3
# those whose bytes are more than a body of JSON may have are refused before anybody looks at them
_NAMES = sorted(name for name in (*BOMBS, *ODD) if name != "too many bytes")
# what is no data URL, or none of an image
_URLS = (
    "http://127.0.0.1/x.png", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "file:///dev/zero", "",
    "data:image/png;base64,", "data:image/png;base64,====", "data:image/png;base64," + "=" * 100_000,
    "data:image/png;base64," + "é" * 1000, "data:video/mp4;base64,AAAA", "data:,x", "x" * 100_000,
    "data:image/png;base64," + "A" * (MOST_BYTES // 8), "data:" + "," * 100_000,
)  # fmt: skip


def request_of(seed: int) -> tuple[str, dict[str, Any]]:
    """A route, and what is sent to it."""
    chosen = random.Random(seed)
    urls = [_url(chosen) for _ in range(chosen.choice((1, 1, 1, 2, 9)))]
    match chosen.randrange(3):
        case 0:
            parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            return "/v1/chat/completions", {"messages": [_user(chosen, parts, "text")], "max_tokens": 1}
        case 1:
            parts = [{"type": "input_image", "image_url": url} for url in urls]
            return "/v1/responses", {"input": [_user(chosen, parts, "input_text")], "max_output_tokens": 16}
        case _:
            parts = [{"type": "image", "source": _source(url)} for url in urls]
            return "/v1/messages", {"messages": [_user(chosen, parts, "text")], "max_tokens": 1}


def make_all() -> None:
    """What is made once, which takes long, so that it is there when it is asked for."""
    for name in _NAMES:
        bomb(name)


def _url(chosen: random.Random) -> str:
    if chosen.random() < 0.2:
        return chosen.choice(_URLS)
    if chosen.random() < _SHARE_OF_BOMBS:
        return data_url(bomb(chosen.choice(_NAMES)), chosen.choice(("png", "jpeg")))
    return data_url(spoilt(chosen.randrange(1 << 30)))


def _source(url: str) -> dict[str, str]:
    if not url.startswith("data:image/png;base64,"):
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}


def _user(chosen: random.Random, parts: list[Any], kind: str) -> dict[str, Any]:
    text = chosen.choice(("hi", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"))
    place = chosen.randrange(len(parts) + 1)
    return {"role": "user", "content": [*parts[:place], {"type": kind, "text": text}, *parts[place:]]}
