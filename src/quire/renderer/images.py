"""Images of strangers: from bytes to pixels, within bounds (4.3.2).

Owns the decoding, which is the one place that gives bytes of strangers to a decoder. Must never: fetch anything, or
show a decoder's own words. Bytes are decoded in decoding_process.py alone: decoders hold the interpreter for tenths of
a second, and nobody knows all their mistakes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 << 20
# 64 MiB in Pillow, which has four bytes a pixel; a few copies of it stay below 256 MiB
MOST_PIXELS = 16 << 20
# its decoder has three copies of its own
MOST_WEBP_PIXELS = 12 << 20
# orientations of EXIF that swap width and height
_ON_ITS_SIDE = (5, 6, 7, 8)


class BadImageError(ValueError):
    """Why an image is refused, in words for who sent it."""


class View(msgspec.Struct, array_like=True, frozen=True):
    """How an image is shown to an encoder: resized, and a box of that, which is black where it reaches beyond."""

    # width and height
    size: tuple[int, int]
    # left, upper, right and lower; None: all of it
    box: tuple[int, int, int, int] | None = None


def open_image(content: bytes) -> Image:
    """Its header alone is read; format and size are within bounds."""
    from PIL import Image, UnidentifiedImageError

    with in_our_words():
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except UnidentifiedImageError:
            allowed = ", ".join(FORMATS).lower()
            raise BadImageError(f"the bytes are no image of a known format. Allowed are {allowed}.") from None
        except Image.DecompressionBombError:
            raise BadImageError(f"the image has too many pixels, at most {MOST_PIXELS} are allowed.") from None
        check_size(image)
        return image


def check_size(image: Image) -> None:
    """Before anything is decoded: the header says it."""
    width, height = image.size
    most = MOST_WEBP_PIXELS if image.format == "WEBP" else MOST_PIXELS
    if width < 1 or height < 1 or width * height > most:
        raise BadImageError(
            f"the image is {width} x {height} pixels; from 1 to {most} pixels are allowed. Make it smaller."
        )


def pixels_of(
    image: Image, views: Sequence[View], views_if_turned: Sequence[View], resample: int
) -> list[npt.NDArray[np.uint8]]:
    """Of each view [height, width, colours]: the right way up, on white where it is transparent. The second views are
    for an image that turns out to lie on its side, of which `upright_size` did not know."""
    from PIL.Image import Resampling

    with in_our_words():
        expected = upright_size(image)
        image = _as_rgb(image)
        pixels = []
        for view in views if image.size == expected else views_if_turned:
            shown = image.resize(view.size, resample=Resampling(resample))
            pixels.append(np.asarray(shown if view.box is None else shown.crop(view.box), dtype=np.uint8))
        return pixels


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height the right way up, as far as what stands before the pixels says."""
    from PIL import ExifTags

    with in_our_words():
        # Pillow would decode a PNG to look behind its pixels
        is_said = image.format != "PNG" or "exif" in image.info
        is_on_its_side = is_said and image.getexif().get(ExifTags.Base.Orientation, 1) in _ON_ITS_SIDE
    width, height = image.size
    return (height, width) if is_on_its_side else (width, height)


@contextmanager
def in_our_words() -> Iterator[None]:
    """A decoder fails in any way, and its words may hold addresses of this process."""
    try:
        yield
    except BadImageError:
        raise
    except MemoryError:
        raise BadImageError("the image takes too much memory to decode. Make it smaller.") from None
    except Exception as error:
        formats = ", ".join(FORMATS).lower()
        raise BadImageError(
            "the image cannot be decoded; it is damaged or incomplete. Send it once more, or as another format "
            f"({formats})."
        ) from error


def _as_rgb(image: Image) -> Image:
    """A copy is made only where something changes: each has 64 MiB at worst."""
    from PIL import ExifTags, Image, ImageOps

    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        return ground
    return image if image.mode == "RGB" else image.convert("RGB")
