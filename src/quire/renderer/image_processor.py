"""From decoded images to what the engine gets: patches for the encoder, and placeholders among the tokens.

One class for each way in which models cut images; Qwen's families share
this one. Called by the renderer.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from quire.config.image_sizes import ImageSizes, is_pooled, not_valid, read_preprocessor
from quire.config.images import MOST_IMAGES
from quire.errors import ModelError, RequestError
from quire.messages import Media
from quire.renderer.image_decoder import ImageDecoder, OpenedImage, Pixels

if TYPE_CHECKING:
    from quire.renderer.tokenizer import Tokenizer

_FILE = "preprocessor_config.json"
_MOST_RATIO = 200
# Pillow's number
_BICUBIC = 3
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Qwen's: an image is resized to whole cells of merge_size x merge_size patches; each cell is one token."""

    image_token_id: int
    patch_size: int = ImageSizes.patch_size
    merge_size: int = ImageSizes.merge_size
    temporal_patch_size: int = ImageSizes.temporal_patch_size
    min_pixels: int = ImageSizes.min_pixels
    max_pixels: int = ImageSizes.max_pixels
    mean: Sequence[float] = _MEAN
    std: Sequence[float] = _STD
    max_images: int = MOST_IMAGES
    decoder: ImageDecoder = field(default_factory=ImageDecoder)
    # Pillow's number
    resample: int = _BICUBIC
    # its tokens see each other
    is_whole: bool = False

    @classmethod
    def find(
        cls,
        folder: Path,
        hf_config: Mapping[str, Any],
        max_images: int = MOST_IMAGES,
        max_image_tokens: int | None = None,
    ) -> ImageProcessor | None:
        """That of a checkpoint; None where the model takes no images."""
        sizes = ImageSizes.read(folder, hf_config)
        if sizes is None:
            return None
        if max_image_tokens is not None:
            sizes = sizes.within(max_image_tokens)
        given = read_preprocessor(folder)
        try:
            if is_pooled(hf_config):
                from quire.renderer.pooled_images import PooledImageProcessor

                return PooledImageProcessor.read(folder / _FILE, given, hf_config, sizes, max_images)
            return cls(
                image_token_id=int(hf_config["image_token_id"]),
                mean=colours_of(given, "image_mean", _MEAN),
                std=colours_of(given, "image_std", _STD),
                max_images=max_images,
                **vars(sizes),
            )
        except ModelError:
            raise
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise not_valid(folder / _FILE, error) from error

    def set_apart(self, pieces: list[str], tokenizer: Tokenizer) -> list[str]:
        """A text whose marks of images stand as the model has learned them."""
        return pieces

    def expand(
        self, token_ids: list[int], sources: Sequence[tuple[Any, str]], max_tokens: int | None
    ) -> tuple[list[int], list[Media]]:
        """Each placeholder becomes as many as its image has tokens. All headers are read, and what does not fit is
        refused, before the first image is decoded."""
        self.check_limit(sources)
        _check_placeholders(sources, token_ids.count(self.image_token_id))
        images = [(self.decoder.open(source, where), where) for source, where in sources]
        given = iter(images)
        starts: list[int] = []
        expanded: list[int] = []
        for token in token_ids:
            if token != self.image_token_id:
                expanded.append(token)
                continue
            image, where = next(given)
            length = self._length(image, where)
            if max_tokens is not None:
                _check_room(length, max_tokens - len(expanded), where)
            starts.append(len(expanded))
            expanded += [token] * length
        media: dict[Any, Media] = {}
        for image, where in images:
            if image.key not in media:
                media[image.key] = self._media(image, where)
        return expanded, [
            replace(media[image.key], start=start) for (image, _), start in zip(images, starts, strict=True)
        ]

    def check_limit(self, sources: Sequence[tuple[Any, str]]) -> None:
        if len(sources) > self.max_images:
            raise RequestError(
                f"{_param_of(sources)}: {len(sources)} images, at most {self.max_images} are allowed in a request "
                "(limit_mm_per_prompt). Send fewer.",
                param=_param_of(sources),
            )

    def _length(self, image: OpenedImage, where: str) -> int:
        """Tokens; the same whichever way is up."""
        width, height = self._resized(*image.size, where)
        return height * width // (self.patch_size * self.merge_size) ** 2

    def _media(self, image: OpenedImage, where: str) -> Media:
        pixels_HWC = image.pixels(lambda width, height: self._resized(width, height, where), self.resample)
        height, width, _ = pixels_HWC.shape
        pixels = self.patches(pixels_HWC)
        grid = [1, height // self.patch_size, width // self.patch_size]
        content = pixels.tobytes()
        # what is beside the bytes belongs to the name: the same bytes in another shape are another image
        numbers = (pixels.dtype.name, pixels.shape, grid, tuple(self.mean), tuple(self.std), self.temporal_patch_size)
        name = hashlib.sha256(f"image {numbers} ".encode())
        name.update(content)
        return Media(
            start=0,
            length=grid[1] * grid[2] // self.merge_size**2,
            pixels=content,
            shape=list(pixels.shape),
            mean=list(self.mean),
            std=list(self.std),
            num_frames=self.temporal_patch_size,
            grid=grid,
            merge_size=self.merge_size,
            content_hash=name.digest(),
            is_whole=self.is_whole,
        )

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        """Width and height in whole cells, with about the same ratio and a bounded number of pixels."""
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise RequestError(
                f"{where}: the image is {width} x {height} pixels; its sides may differ by a factor of {_MOST_RATIO} "
                "at most. Cut it.",
                param=where,
            )
        cell = self.patch_size * self.merge_size
        new_height, new_width = round(height / cell) * cell, round(width / cell) * cell
        if new_height * new_width > self.max_pixels:
            ratio = math.sqrt(height * width / self.max_pixels)
            new_height = max(cell, math.floor(height / ratio / cell) * cell)
            new_width = max(cell, math.floor(width / ratio / cell) * cell)
        elif new_height * new_width < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * ratio / cell) * cell
            new_width = math.ceil(width * ratio / cell) * cell
        return new_width, new_height

    def patches(self, pixels_HWC: Pixels) -> Pixels:
        """[patches, colours, side * side], cell by cell."""
        height, width, _ = pixels_HWC.shape
        side, merge = self.patch_size, self.merge_size
        rows, columns = height // side // merge, width // side // merge
        cells = pixels_HWC.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(cells).reshape(rows * columns * merge**2, 3, side * side)


def colours_of(given: Mapping[str, Any], name: str, default: Sequence[float]) -> tuple[float, ...]:
    """A number for each colour. ValueError: it cannot be one that pixels are divided by."""
    numbers = tuple(float(number) for number in given.get(name) or default)
    if len(numbers) != len(default) or not all(map(math.isfinite, numbers)) or (name == "image_std" and 0 in numbers):
        raise ValueError(f"{name}={str(numbers)[:80]}: must be {len(default)} numbers, and those of image_std not 0.")
    return numbers


def _param_of(sources: Sequence[tuple[Any, str]]) -> str:
    """What holds all images: the first part of their places."""
    return re.split(r"[.\[]", sources[0][1], maxsplit=1)[0] if sources else "multi_modal_data"


def _check_placeholders(sources: Sequence[tuple[Any, str]], count: int) -> None:
    if count != len(sources):
        param = _param_of(sources)
        raise RequestError(
            f"{param}: {len(sources)} images for {count} placeholders in the prompt. Each image needs one, which the "
            "chat template writes for the images of a chat.",
            param=param,
        )


def _check_room(length: int, room: int, where: str) -> None:
    if length > room:
        raise RequestError(
            f"{where}: the image becomes {length} tokens, and the model's context has room for {max(0, room)} more. "
            "Make it smaller.",
            param=where,
            code="context_length_exceeded",
        )
