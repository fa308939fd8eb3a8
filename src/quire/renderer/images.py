"""Images to pixels and placeholders (4.3.2): from what a client sent to what a model's encoder takes.

Owns the bounds on what is decoded. A client's image is hostile until it is read: only four formats are opened, its size
is known before its pixels are, one is decoded at a time, and whatever the decoder says stays here. Called by Renderer,
off the event loop.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError, RequestError
from quire.json_files import read_object
from quire.messages import ImageItem

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_FORMAT_NAMES = "PNG, JPEG, WebP and GIF (its first frame)"
MOST_BYTES = 20 * 2**20
MOST_PIXELS = 2**24
_MOST_RATIO = 200
_PROCESSOR_FILE = "preprocessor_config.json"
# Decoded pixels are what takes memory: however many threads render, one image is decoded at a time.
_decoding = threading.Lock()


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image as it came: a data URL, bytes, or an image of Pillow; and where it stood, for messages."""

    content: Any
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessor:
    """What preprocessor_config.json says of a model of the Qwen VL family: each square of patches becomes a token."""

    patch_size: int
    merge_size: int
    least_pixels: int
    most_pixels: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def read(cls, folder: Path) -> ImageProcessor:
        file = folder / _PROCESSOR_FILE
        if not file.is_file():
            raise ModelError(f"{file}: is not there, and says how this model's images are prepared. Download it.")
        values = read_object(file)
        size = values.get("size") if isinstance(values.get("size"), dict) else {}
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if values.get(name, True) is not True:
                raise ModelError(f"{file}: {name}={values[name]!r}: only true is supported.")
        try:
            return cls(
                patch_size=_positive(values.get("patch_size", 14)),
                merge_size=_positive(values.get("merge_size", 2)),
                least_pixels=_positive(values.get("min_pixels") or size.get("shortest_edge", 56 * 56)),
                most_pixels=_positive(values.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)),
                resample=int(values.get("resample", 3)),
                scale=float(values.get("rescale_factor", 1 / 255)),
                mean=_three(values.get("image_mean", (0.48145466, 0.4578275, 0.40821073))),
                std=_three(values.get("image_std", (0.26862954, 0.26130258, 0.27577711))),
            )
        except (TypeError, ValueError) as error:
            raise ModelError(f"{file}: {error}. Take the file that belongs to the weights.") from None

    @property
    def unit(self) -> int:
        """Pixels on a side of what becomes a token."""
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        """Width and height as the model sees them: whole tokens, and as many pixels as it was trained with."""
        if max(width, height) > _MOST_RATIO * min(width, height):
            raise _refused(where, f"{width} x {height} pixels: one side may be {_MOST_RATIO} times the other at most")
        unit = self.unit
        new_width, new_height = round(width / unit) * unit, round(height / unit) * unit
        if new_width * new_height > self.most_pixels:
            factor = math.sqrt(width * height / self.most_pixels)
            new_width = max(unit, math.floor(width / factor / unit) * unit)
            new_height = max(unit, math.floor(height / factor / unit) * unit)
        elif new_width * new_height < self.least_pixels:
            factor = math.sqrt(self.least_pixels / (width * height))
            new_width = math.ceil(width * factor / unit) * unit
            new_height = math.ceil(height * factor / unit) * unit
        return new_width, new_height

    def item(self, source: ImageSource, position: int, most_tokens: int | None) -> ImageItem:
        """The image, ready for the encoder. One that cannot be so few tokens is refused before it is decoded."""
        with _decoding, _opened(source) as image:
            width, height = self.resized(*_upright_size(image), source.where)
            num_tokens = width * height // self.unit**2
            if most_tokens is not None and num_tokens > most_tokens:
                raise _refused(source.where, f"it takes {num_tokens} tokens, {most_tokens} are left for it")
            pixels = _pixels(image, (width, height), self.resample, source.where)
        digest = hashlib.sha256()
        shape = (height, width, 3)
        digest.update(struct.pack("<16sqqqqq", b"RGB uint8", *shape, self.patch_size, self.merge_size))
        digest.update(struct.pack("<7d", self.scale, *self.mean, *self.std))
        digest.update(pixels)
        return ImageItem(
            position=position,
            num_rows=height // self.unit,
            num_columns=width // self.unit,
            pixels=pixels,
            shape=shape,
            dtype="uint8",
            scale=self.scale,
            mean=self.mean,
            std=self.std,
            content_hash=digest.digest(),
        )


class ImageRenderer:
    """Puts images in the place of the placeholders among a prompt's tokens."""

    def __init__(self, processor: ImageProcessor, placeholder_id: int, most_images: int) -> None:
        self._processor = processor
        self._placeholder_id = placeholder_id
        self._most_images = most_images

    @classmethod
    def find(cls, folder: Path, hf_config: Mapping[str, Any], most_images: int) -> ImageRenderer | None:
        """None for a model that reads text only."""
        if hf_config.get("model_type") not in _PLACEHOLDERS or not most_images:
            return None
        key, default = _PLACEHOLDERS[hf_config["model_type"]]
        return cls(ImageProcessor.read(folder), int(hf_config.get(key, default)), most_images)

    def check_number(self, sources: Sequence[ImageSource]) -> None:
        if len(sources) > self._most_images:
            raise RequestError(
                f"images: {len(sources)} given, a request may have {self._most_images} (limit_mm_per_prompt). Leave "
                "some out.",
                param="messages",
            )

    def place(
        self, token_ids: Sequence[int], sources: Sequence[ImageSource], max_tokens: int | None
    ) -> tuple[list[int], list[ImageItem]]:
        """The tokens with as many placeholders for each image as it has tokens, and the images."""
        self.check_number(sources)
        places = [index for index, token in enumerate(token_ids) if token == self._placeholder_id]
        if len(places) != len(sources):
            raise RequestError(
                f"images: {len(sources)} given, and the prompt has {len(places)} placeholders (token "
                f"{self._placeholder_id}). Give one for each.",
                param="prompt",
            )
        expanded: list[int] = []
        items: list[ImageItem] = []
        copied = 0
        for index, source in zip(places, sources, strict=True):
            expanded += token_ids[copied:index]
            left = None if max_tokens is None else max_tokens - len(expanded) - (len(token_ids) - index - 1)
            items.append(self._processor.item(source, len(expanded), left))
            expanded += [self._placeholder_id] * items[-1].num_tokens
            copied = index + 1
        expanded += token_ids[copied:]
        return expanded, items


# model_type -> (the key of config.json that names its placeholder, what it is where the key is missing)
_PLACEHOLDERS = {"qwen2_5_vl": ("image_token_id", 151_655)}


def _opened(source: ImageSource) -> Image:
    """Its header is read, its pixels are not. Bytes that no format of ours fits are refused without more words: what
    a decoder says of hostile bytes is not for whoever sent them."""
    import PIL.Image

    if isinstance(source.content, PIL.Image.Image):
        # a user of the library brings his own; a copy, because closing it would close his
        image = source.content.copy()
    else:
        try:
            image = PIL.Image.open(io.BytesIO(_bytes_of(source)), formats=FORMATS)
        except RequestError:
            raise
        except Exception:
            raise _refused(source.where, f"cannot be read as an image; {_FORMAT_NAMES} are allowed") from None
    width, height = image.size
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        image.close()
        raise _refused(source.where, f"{width} x {height} pixels, at most {MOST_PIXELS:,} are allowed")
    return image


def _bytes_of(source: ImageSource) -> bytes:
    content = source.content
    if isinstance(content, bytes):
        data = content
    elif isinstance(content, str) and content[:5].lower() == "data:":
        head, comma, body = content.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _refused(source.where, 'a data URL must look like "data:image/png;base64,..."')
        if len(body) > MOST_BYTES * 4 // 3 + 4:
            raise _refused(source.where, f"{len(body) * 3 // 4} bytes, at most {MOST_BYTES} are allowed")
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise _refused(source.where, "the data URL is no valid base64") from None
    elif isinstance(content, str):
        raise _refused(source.where, "images are not fetched from the network or from files; send a data URL")
    else:
        raise _refused(source.where, f"a {type(content).__name__} is no image; give a data URL")
    if len(data) > MOST_BYTES:
        raise _refused(source.where, f"{len(data)} bytes, at most {MOST_BYTES} are allowed")
    return data


def _upright_size(image: Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) >= 5 else (width, height)


def _orientation(image: Image) -> int:
    """As a camera wrote it; 1 where there is none, or none that can be read."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _pixels(image: Image, size: tuple[int, int], resample: int, where: str) -> bytes:
    """Red, green and blue as somebody sees them who looks at the image: upright, and transparent parts white."""
    import PIL.Image
    import PIL.ImageOps

    try:
        is_turned = _orientation(image) > 1
        image.load()
        if is_turned:
            image = PIL.ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16") or image.mode == "I":
            image = image.point(lambda value: value / 256).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            seen = image.convert("RGBA")
            image = PIL.Image.new("RGB", image.size, (255, 255, 255))
            image.paste(seen, mask=seen.getchannel("A"))
        return image.convert("RGB").resize(size, PIL.Image.Resampling(resample)).tobytes()
    except Exception:
        raise _refused(where, "its pixels cannot be read; the file is damaged or ends too early") from None


def _refused(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}.", param=where)


def _positive(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} must be a positive whole number")
    return value


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue
