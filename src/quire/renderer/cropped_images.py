"""Images of LLaVA: every one is resized, and the square in its middle is what the tower sees.

Called by the renderer, as any ImageProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.image_sizes import ImageSizes, image_token_of
from quire.errors import ModelError
from quire.messages import Media
from quire.renderer.image_decoder import OpenedImage
from quire.renderer.image_processor import (
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    check_ratio,
    check_steps,
    common_fields,
)
from quire.renderer.images import MOST_PIXELS, View

_HALVES = (0.5, 0.5, 0.5)
_SIDE = 224


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """`size`: of the shorter side, or both width and height. `crop`: width and height of the middle that is left."""

    size: int | tuple[int, int]
    crop: tuple[int, int] | None

    @classmethod
    def read(cls, given: Mapping[str, Any], *, has_crop: bool) -> Geometry:
        """`has_crop`: where nothing is said. ValueError and its like: they are no sizes."""
        size = given.get("size", {"shortest_edge": _SIDE} if has_crop else {"height": _SIDE, "width": _SIDE})
        if isinstance(size, dict):
            size = size.get("shortest_edge") or (int(size["width"]), int(size["height"]))
        crop = given.get("crop_size", _SIDE)
        if isinstance(crop, dict):
            crop = crop["width"], crop["height"]
        width, height = crop if isinstance(crop, tuple) else (crop, crop)
        is_cropped = given.get("do_center_crop", has_crop)
        geometry = cls(
            size=size if isinstance(size, tuple) else int(size),
            crop=(int(width), int(height)) if is_cropped else None,
        )
        numbers = [*(geometry.crop or ()), *(size if isinstance(size, tuple) else (geometry.size,))]
        if not all(1 <= number <= math.isqrt(MOST_PIXELS) for number in numbers):
            raise ValueError(f"size, crop_size: must be from 1 to {math.isqrt(MOST_PIXELS)} pixels a side.")
        return geometry

    @property
    def seen(self) -> tuple[int, int] | None:
        """Width and height of what comes out; None: they depend on the image."""
        return self.crop or (self.size if isinstance(self.size, tuple) else None)

    @property
    def most_ratio(self) -> int:
        """Of the longer side of an image to the shorter one, so that it does not become too large before it is cut."""
        return MOST_PIXELS // self.size**2 if isinstance(self.size, int) else MOST_PIXELS

    def view(self, width: int, height: int) -> View:
        if isinstance(self.size, int):
            longer = int(self.size * max(width, height) / min(width, height))
            size = (self.size, longer) if width <= height else (longer, self.size)
        else:
            size = self.size
        if self.crop is None:
            return View(size)
        left, upper = (size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2
        return View(size, (left, upper, left + self.crop[0], upper + self.crop[1]))


@dataclass(frozen=True, kw_only=True)
class CroppedImageProcessor(ImageProcessor):
    """Each patch of the square is one token."""

    geometry: Geometry

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> CroppedImageProcessor:
        check_steps(given, ("do_resize", "do_rescale", "do_normalize"))
        kind = str(given.get("image_processor_type", ""))
        is_siglip = kind.startswith("Siglip")
        if kind.startswith("Llava") and given.get("do_pad"):
            raise ModelError(f"{file}: do_pad=true: images are not padded to squares here. Set it to false.")
        geometry = Geometry.read(given, has_crop=not is_siglip)
        mean, std = (_HALVES, _HALVES) if is_siglip else (CLIP_MEAN, CLIP_STD)
        side: int = hf_config["vision_config"].get("image_size", _SIDE)
        if geometry.seen != (side, side):
            seen = "of a size of their own" if geometry.seen is None else "{} x {} pixels".format(*geometry.seen)
            raise ModelError(
                f"{file}: images become {seen}, and the tower sees {side} x {side} (vision_config.image_size of "
                "config.json). Take the files that belong to the model."
            )
        return cls(
            image_token_id=image_token_of(hf_config),
            geometry=geometry,
            **cls._further(file, given, hf_config, side),
            **common_fields(given, sizes, max_images, mean=mean, std=std),
        )

    @classmethod
    def _further(cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], side: int) -> dict[str, Any]:
        """Fields of a class that does more with squares of this side in pixels."""
        return {}

    def _media(self, image: OpenedImage, where: str) -> list[Media]:
        [pixels_HWC] = image.views(lambda width, height: [self.geometry.view(width, height)], self.resample)
        side = math.isqrt(self.max_pixels)
        return [self._medium(pixels_HWC[:side, :side])]

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        check_ratio(width, height, where, self.geometry.most_ratio)
        side = math.isqrt(self.max_pixels)
        return side, side
