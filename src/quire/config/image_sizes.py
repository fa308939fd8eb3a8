"""How the images of a checkpoint are cut: numbers of preprocessor_config.json and config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.errors import ModelError, one_line

_COLOURS = 3
# of a square's side in patches or pixels, and of frames: published ones have up to 16
_LONGEST_SIDE = 1024
_MOST_PIXELS = 1 << 30
# in pixels, of an image that is no other size
_LONGEST_SQUARE = 4096


@dataclass(frozen=True)
class ImageSizes:
    """Squares of merge_size x merge_size patches become a token each; a patch has patch_size x patch_size pixels."""

    patch_size: int = 14
    merge_size: int = 2
    # how often the encoder gets each pixel: it was made for videos
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    def __post_init__(self) -> None:
        """ValueError: no image can be cut so."""
        sides = {name: getattr(self, name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        for name, side in sides.items():
            if not 1 <= side <= _LONGEST_SIDE:
                raise ValueError(f"{name}={side}: must be from 1 to {_LONGEST_SIDE}.")
        cell = (self.patch_size * self.merge_size) ** 2
        if not 1 <= self.min_pixels <= self.max_pixels <= _MOST_PIXELS or cell > self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels}, max_pixels={self.max_pixels}: must be from 1 to {_MOST_PIXELS}, the "
                f"second the greater one and not below the {cell} pixels of a token."
            )

    @classmethod
    def read(cls, folder: Path, hf_config: Mapping[str, Any]) -> ImageSizes | None:
        """Those of a checkpoint; None where the model takes no images."""
        read_family = _FAMILIES.get(str(hf_config.get("model_type")))
        if read_family is None:
            return None
        given = read_preprocessor(folder)
        try:
            return read_family(given, hf_config)
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError, OverflowError) as error:
            raise not_valid(preprocessor_file(folder), error) from error

    def within(self, max_tokens: int) -> ImageSizes:
        """The same, with larger images made smaller until they have no more tokens, if there are sizes so small."""
        most = max_tokens * (self.patch_size * self.merge_size) ** 2
        return replace(self, max_pixels=max(self.min_pixels, min(self.max_pixels, most)))

    def largest(self, max_tokens: int) -> LargestImage:
        """The image that costs the encoder most, of those that a prompt of `max_tokens` has room for."""
        cells = max(1, min(self.max_pixels // (self.patch_size * self.merge_size) ** 2, max_tokens))
        rows = math.isqrt(cells)
        values = _COLOURS * self.temporal_patch_size * self.patch_size**2
        return LargestImage(rows, -(-cells // rows), self.merge_size, values, self.min_pixels == self.max_pixels)


@dataclass(frozen=True)
class LargestImage:
    """Rows and columns of tokens, how many patches a side a token has, and how many numbers a patch."""

    rows: int
    columns: int
    merge_size: int
    patch_values: int
    # the encoder takes no other
    is_only_size: bool


def whole_cells(
    width: int, height: int, side: int, least: int, most: int, num_frames: int = 1, num_counted: int = 1
) -> tuple[int, int]:
    """Width and height in whole cells, with about the same ratio and a bounded number of pixels. Of several frames all
    are bounded together, of which `num_counted` are counted."""
    new_height, new_width = round(height / side) * side, round(width / side) * side
    if num_counted * new_height * new_width > most:
        ratio = math.sqrt(num_frames * height * width / most)
        new_height = max(side, math.floor(height / ratio / side) * side)
        new_width = max(side, math.floor(width / ratio / side) * side)
    elif num_counted * new_height * new_width < least:
        ratio = math.sqrt(least / (num_frames * height * width))
        new_height = math.ceil(height * ratio / side) * side
        new_width = math.ceil(width * ratio / side) * side
    return new_width, new_height


def _whole_cells(given: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ImageSizes | None:
    """Of Qwen's models."""
    if "image_token_id" not in hf_config:
        return None
    size = given.get("size") or {}
    return ImageSizes(
        patch_size=int(given.get("patch_size", ImageSizes.patch_size)),
        merge_size=int(given.get("merge_size", ImageSizes.merge_size)),
        temporal_patch_size=int(given.get("temporal_patch_size", ImageSizes.temporal_patch_size)),
        min_pixels=int(given.get("min_pixels") or size.get("shortest_edge") or ImageSizes.min_pixels),
        max_pixels=int(given.get("max_pixels") or size.get("longest_edge") or ImageSizes.max_pixels),
    )


def _one_square(given: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ImageSizes | None:
    """Of Gemma 3: every image has one size."""
    if "vision_config" not in hf_config:
        return None
    vision = hf_config["vision_config"] or {}
    image_size, patch_size = _side_in(vision, "image_size", 224), _side_in(vision, "patch_size", 16)
    tokens_of_side = math.isqrt(int(hf_config.get("mm_tokens_per_image") or 256))
    merge_size = max(1, image_size // patch_size // max(1, tokens_of_side))
    return ImageSizes(patch_size, merge_size, 1, image_size**2, image_size**2)


def _soft_tokens(given: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ImageSizes | None:
    """Of Gemma 4: an image has about as many tokens as are allowed, in rows and columns of its own ratio."""
    vision = hf_config.get("vision_config")
    if vision is None:
        return None
    patch_size, merge_size = int(given.get("patch_size", 16)), int(given.get("pooling_kernel_size", 3))
    num_tokens = int(given.get("max_soft_tokens", 280))
    num_places = _side_in(vision, "position_embedding_size", 10_240, most=_MOST_PIXELS)
    of_config = _side_in(vision, "patch_size", 16), _side_in(vision, "pooling_kernel_size", 3)
    if of_config != (patch_size, merge_size):
        raise ValueError(
            f"patch_size={patch_size}, pooling_kernel_size={merge_size}: must be those of vision_config in "
            f"config.json, {of_config[0]} and {of_config[1]}."
        )
    if not 1 <= num_tokens * merge_size <= num_places:
        raise ValueError(
            f"max_soft_tokens={num_tokens}: must be from 1 to {num_places // merge_size}, for which there are rows "
            "in vision_config.position_embedding_size."
        )
    cell = (patch_size * merge_size) ** 2
    return ImageSizes(patch_size, merge_size, 1, cell, num_tokens * cell)


# Families that join a tower to a text model, and the kinds of towers that are built for each; the first where
# config.json says nothing.
JOINED = {
    "internvl": ("internvl_vision",),
    "llava": ("clip_vision_model", "siglip_vision_model", "pixtral"),
    "llava_next": ("clip_vision_model", "siglip_vision_model"),
    "mistral3": ("pixtral",),
}
JOINED_TEXTS = ("llama", "ministral3", "mistral", "qwen2", "qwen3", "qwen3_moe")
# Which vectors of a tower are taken: those of patches alone, or all.
TOWERS = {
    "clip_vision_model": "default",
    "internvl_vision": "default",
    "pixtral": "full",
    "siglip_vision_model": "full",
}
PIXTRAL, INTERN = "pixtral", "internvl_vision"
_IMAGE_TOKENS = {"internvl": 151_667, "llava": 32_000, "llava_next": 32_000, "mistral3": 10}


def joined_tower(hf_config: Mapping[str, Any]) -> str | None:
    """The kind of the tower that is joined to a text model; None where one of them is not built."""
    text, vision = hf_config.get("text_config"), hf_config.get("vision_config")
    kinds = JOINED.get(str(hf_config.get("model_type")))
    if kinds is None or not isinstance(text, dict) or not isinstance(vision, dict):
        return None
    tower = vision.get("model_type") or kinds[0]
    return tower if text.get("model_type") in JOINED_TEXTS and tower in kinds else None


def _of_tower(given: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ImageSizes | None:
    """Of LLaVA and its relatives: one square, or lines of as many cells as an image has."""
    tower = joined_tower(hf_config)
    if tower is None:
        return None
    vision = hf_config["vision_config"]
    if tower != PIXTRAL:
        patch_size = _side_in(vision, "patch_size", 32 if tower == "clip_vision_model" else 16)
        # what is left of the last patch is not seen
        side = _side_in(vision, "image_size", 224) // patch_size * patch_size
        return ImageSizes(patch_size, 1, 1, side**2, side**2)
    patch_size = _side_in(vision, "patch_size", 16)
    merge_size = int(hf_config.get("spatial_merge_size", 2)) if hf_config["model_type"] == "mistral3" else 1
    cell = patch_size * merge_size
    height, width = (-(-side // cell) * cell for side in longest_sides(given))
    return ImageSizes(patch_size, merge_size, 1, cell**2, height * width)


def _one_tile(given: Mapping[str, Any], hf_config: Mapping[str, Any]) -> ImageSizes | None:
    """Of InternVL: the squares that an image is cut into have one size."""
    if joined_tower(hf_config) is None:
        return None
    vision = hf_config["vision_config"]
    image_size, patch_size = _side_in(vision, "image_size", 448), _side_in(vision, "patch_size", 14)
    merge_size = cells_merged(hf_config)
    size = given.get("size") or {"height": image_size, "width": image_size}
    if side_of([size["height"], size["width"]], "size") != image_size:
        raise ValueError(f"size={str(size)[:60]}: must be vision_config.image_size={image_size} of config.json.")
    if image_size % (patch_size * merge_size):
        raise ValueError(
            f"vision_config.image_size={image_size} must be a multiple of patch_size={patch_size} times {merge_size}, "
            "which is 1 / downsample_ratio."
        )
    return ImageSizes(patch_size, merge_size, 1, image_size**2, image_size**2)


def side_of(given: Any, name: str, most: int = _LONGEST_SQUARE) -> int:
    """Of a square: its side, or height and width. ValueError: it is none."""
    first, *others = given if isinstance(given, list | tuple) and given else [given]
    if type(first) is not int or not 1 <= first <= most or any(other != first for other in others):
        raise ValueError(f"{name}={str(given)[:60]}: must be the side of a square, from 1 to {most}.")
    return first


def _side_in(vision: Mapping[str, Any], name: str, default: int, most: int = _LONGEST_SQUARE) -> int:
    return side_of(vision.get(name, default), f"vision_config.{name}", most)


def cells_merged(hf_config: Mapping[str, Any]) -> int:
    """How many patches a side become one token. ValueError: no whole number."""
    ratio = hf_config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 1 / _LONGEST_SIDE <= ratio <= 1 or 1 / ratio % 1:
        raise ValueError(f"downsample_ratio={str(ratio)[:40]}: must be 1 divided by a whole number, such as 0.5.")
    return int(1 / ratio)


def image_token_of(hf_config: Mapping[str, Any]) -> int:
    """What stands for an image of such a family."""
    default = _IMAGE_TOKENS[hf_config["model_type"]]
    return int(hf_config.get("image_token_index", hf_config.get("image_token_id", default)))


def longest_sides(given: Mapping[str, Any]) -> tuple[int, int]:
    """Of Pixtral's images: height and width in pixels within which they keep their size. ValueError: there are none."""
    size = given.get("size", 1024)
    longest = size.get("longest_edge") if isinstance(size, dict) else size
    height, width = (longest, longest) if longest else (int(size["height"]), int(size["width"]))
    if min(height, width) < 1:
        raise ValueError(f"size={str(size)[:60]}: must be at least 1 pixel.")
    return int(height), int(width)


# What the numbers of a model_type are; None: it takes no images.
_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ImageSizes | None]] = {
    "gemma3": _one_square,
    "gemma4": _soft_tokens,
    "internvl": _one_tile,
    "llava": _of_tower,
    "llava_next": _of_tower,
    "mistral3": _of_tower,
    "qwen2_vl": _whole_cells,
    "qwen2_5_vl": _whole_cells,
    "qwen3_vl": _whole_cells,
    "qwen3_vl_moe": _whole_cells,
}


def preprocessor_file(folder: Path) -> Path:
    """Where the numbers of an image processor stand: in a file of its own, or among those of all processors."""
    whole = folder / "processor_config.json"
    return whole if "image_processor" in _read_object(whole) else folder / "preprocessor_config.json"


def read_preprocessor(folder: Path) -> Mapping[str, Any]:
    """What is said about images; nothing, if there is no file."""
    file = preprocessor_file(folder)
    given = _read_object(file)
    inner = given.get("image_processor", given)
    if not isinstance(inner, dict):
        raise not_valid(file, TypeError("no object"))
    return inner


def _read_object(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise not_valid(file, error) from error
    if not isinstance(given, dict):
        raise not_valid(file, TypeError("no object"))
    return given


def not_valid(file: Path, error: Exception) -> ModelError:
    why = one_line(error)
    return ModelError(f"{file}: no image processor's configuration ({why}). Take the one that belongs to the model.")
