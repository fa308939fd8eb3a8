"""Images of a request: from what a client sent to pixels, within bounds (4.3.2).

Owns the decoding, which is the one place that gives bytes of strangers to a decoder. Must never: fetch anything, or
show a decoder's own words. Called by ImageProcessor in a thread of the renderer.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 << 20
# 64 MiB in Pillow, which has four bytes a pixel; a few copies of it stay below 256 MiB
MOST_PIXELS = 16 << 20
_DATA = "data:"
# Of base64, decoded in one go: other threads wait that long at most. A multiple of four.
_PIECE = 1 << 18


def open_image(source: Any, where: str) -> Image:
    """An image of a data URL, encoded bytes or an image of Pillow, whose header alone was read: bytes, format and size
    are within bounds."""
    from PIL import Image

    if isinstance(source, str):
        source = _bytes_of(source, where)
    with _in_our_words(where):
        if isinstance(source, bytes | bytearray):
            source = _opened(bytes(source), where)
        if not isinstance(source, Image.Image):
            raise RequestError(
                f"{where}: must be a data URL, encoded bytes or an image of Pillow, not a {type(source).__name__}.",
                param=where,
            )
        _check_size(source, where)
        return source


def decode_image(image: Image, where: str) -> Image:
    """RGB; the right way up, on white where it is transparent."""
    with _in_our_words(where):
        return _as_rgb(image)


@contextmanager
def _in_our_words(where: str) -> Iterator[None]:
    """A decoder fails in any way, and its words may hold addresses of this process."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"{where}: the image cannot be decoded; it is damaged or incomplete. Send it once more, or as another "
            f"format ({', '.join(FORMATS).lower()}).",
            param=where,
        ) from error


def _bytes_of(url: str, where: str) -> bytes:
    if not url[: len(_DATA)].lower() == _DATA:
        raise RequestError(
            f"{where}: only data URLs are taken (data:image/png;base64,...), or what was fetched before. Send the "
            "image itself.",
            param=where,
        )
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64") or not head.lower().startswith("data:image/"):
        raise RequestError(f"{where}: must begin with data:image/FORMAT;base64, and go on in base64.", param=where)
    if len(content) // 4 * 3 > MOST_BYTES:
        raise too_many_bytes(len(content) // 4 * 3, where)
    try:
        return _decoded_base64(content)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{where}: what follows the comma is not valid base64.", param=where) from error


def _decoded_base64(text: str) -> bytes:
    if "=" in text[:-2]:
        raise ValueError("padding before the end")
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)


def _opened(content: bytes, where: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    if len(content) > MOST_BYTES:
        raise too_many_bytes(len(content), where)
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise RequestError(
            f"{where}: the bytes are no image of a known format. Allowed are {', '.join(FORMATS).lower()}.", param=where
        ) from error
    except Image.DecompressionBombError as error:
        raise RequestError(
            f"{where}: the image has too many pixels, at most {MOST_PIXELS} are allowed.", param=where
        ) from error


def _check_size(image: Image, where: str) -> None:
    """Before anything is decoded: the header says it."""
    width, height = image.size
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise RequestError(
            f"{where}: the image is {width} x {height} pixels; from 1 to {MOST_PIXELS} pixels are allowed. Make it "
            "smaller.",
            param=where,
        )


def _as_rgb(image: Image) -> Image:
    """Each step lets go of what it was made from, where the caller does: images are large."""
    from PIL import Image, ImageOps

    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        return ground
    return image if image.mode == "RGB" else image.convert("RGB")


def too_many_bytes(count: int, where: str) -> RequestError:
    return RequestError(
        f"{where}: the image has {count} bytes, at most {MOST_BYTES} are allowed. Make it smaller.", param=where
    )
