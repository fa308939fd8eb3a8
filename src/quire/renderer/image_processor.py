"""From decoded images to what the engine gets: patches for the encoder, and placeholders among the tokens.

Owns the numbers of preprocessor_config.json. One class for each way in which models cut images; Qwen's families share
this one. Called by the renderer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.config.images import MOST_IMAGES
from quire.errors import ModelError, RequestError
from quire.messages import Media
from quire.renderer.images import decode_image, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

# What a client writes in a message, and under which name the image stands there.
_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")
_MOST_RATIO = 200
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Qwen's: an image is resized to whole cells of merge_size x merge_size patches; each cell is one token."""

    image_token_id: int
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: Sequence[float] = _MEAN
    std: Sequence[float] = _STD
    max_images: int = MOST_IMAGES

    @classmethod
    def find(
        cls, folder: Path, hf_config: Mapping[str, Any], max_images: int = MOST_IMAGES
    ) -> ImageProcessor | None:
        """That of a checkpoint; None where the model takes no images."""
        if hf_config.get("model_type") not in MODEL_TYPES or "image_token_id" not in hf_config:
            return None
        file = folder / "preprocessor_config.json"
        try:
            given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            size = given.get("size") or {}
            return cls(
                image_token_id=int(hf_config["image_token_id"]),
                patch_size=int(given.get("patch_size", cls.patch_size)),
                merge_size=int(given.get("merge_size", cls.merge_size)),
                temporal_patch_size=int(given.get("temporal_patch_size", cls.temporal_patch_size)),
                min_pixels=int(given.get("min_pixels") or size.get("shortest_edge") or cls.min_pixels),
                max_pixels=int(given.get("max_pixels") or size.get("longest_edge") or cls.max_pixels),
                mean=tuple(given.get("image_mean") or _MEAN),
                std=tuple(given.get("image_std") or _STD),
                max_images=max_images,
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{file}: not a valid image processor's configuration.") from error

    def take_from_chat(self, chat: Any) -> tuple[Any, list[Any]]:
        """The chat with a bare {"type": "image"} for each image, and the images in their order."""
        if not isinstance(chat, Sequence) or isinstance(chat, str | bytes):
            return chat, []
        sources: list[Any] = []
        return [self._without(message, f"messages[{n}]", sources) for n, message in enumerate(chat)], sources

    def _without(self, message: Any, where: str, sources: list[Any]) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        parts = []
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(kind, str) or kind not in _PARTS:
                parts.append(part)
                continue
            place = f"{where}.content[{number}].{_PARTS[kind]}"
            source = part.get(_PARTS[kind])
            source = source.get("url") if isinstance(source, Mapping) else source
            if source is None:
                raise RequestError(f"{place}: this field is required; it holds the image.", param=place)
            sources.append((source, place))
            parts.append({"type": "image"})
        return {**message, "content": parts}

    def expand(
        self, token_ids: list[int], sources: Sequence[tuple[Any, str]], max_tokens: int | None
    ) -> tuple[list[int], list[Media]]:
        """Each placeholder becomes as many as its image has tokens. All headers are read, and what does not fit is
        refused, before the first image is decoded."""
        self._check_count(sources, token_ids.count(self.image_token_id))
        images = _opened_once(sources)
        given = iter(zip(images, (where for _, where in sources), strict=True))
        starts: list[int] = []
        expanded: list[int] = []
        for token in token_ids:
            if token != self.image_token_id:
                expanded.append(token)
                continue
            image, where = next(given)
            length = self._length(image)
            if max_tokens is not None:
                _check_room(length, max_tokens - len(expanded), where)
            starts.append(len(expanded))
            expanded += [token] * length
        media: dict[int, Media] = {}
        for image in images:
            if id(image) not in media:
                media[id(image)] = self._media(image)
        return expanded, [replace(media[id(image)], start=start) for image, start in zip(images, starts, strict=True)]

    def _check_count(self, sources: Sequence[tuple[Any, str]], num_placeholders: int) -> None:
        param = "messages" if sources and sources[0][1].startswith("messages") else "multi_modal_data"
        if len(sources) > self.max_images:
            raise RequestError(
                f"{param}: {len(sources)} images, at most {self.max_images} are allowed in a request "
                "(limit_mm_per_prompt). Send fewer.",
                param=param,
            )
        if num_placeholders != len(sources):
            raise RequestError(
                f"{param}: {len(sources)} images for {num_placeholders} placeholders in the prompt. Each image needs "
                "one, which the chat template writes for the images of a chat.",
                param=param,
            )

    def _length(self, image: _Opened) -> int:
        """Tokens; the same whichever way is up."""
        height, width = self._resized(*image.size, image.where)
        return height * width // (self.patch_size * self.merge_size) ** 2

    def _media(self, image: _Opened) -> Media:
        decoded = decode_image(image.image, image.where)
        height, width = self._resized(*decoded.size, image.where)
        pixels = self.patches(decoded, height, width)
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
        )

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        """Height and width in whole cells, with about the same ratio and a bounded number of pixels."""
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
        return new_height, new_width

    def patches(self, image: Image, height: int, width: int) -> npt.NDArray[np.uint8]:
        """[patches, colours, side * side], cell by cell."""
        from PIL.Image import Resampling

        resized = image.resize((width, height), resample=Resampling.BICUBIC)
        pixels_HWC: npt.NDArray[np.uint8] = np.asarray(resized, dtype=np.uint8)
        side, merge = self.patch_size, self.merge_size
        rows, columns = height // side // merge, width // side // merge
        cells = pixels_HWC.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(cells).reshape(rows * columns * merge**2, 3, side * side)


@dataclass(frozen=True)
class _Opened:
    """An image whose header was read, and where it stands in the request."""

    image: Image
    where: str

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as they are stored."""
        return self.image.size


def _check_room(length: int, room: int, where: str) -> None:
    if length > room:
        raise RequestError(
            f"{where}: the image becomes {length} tokens, and the model's context has room for {max(0, room)} more. "
            "Make it smaller.",
            param=where,
            code="context_length_exceeded",
        )


def _opened_once(sources: Sequence[tuple[Any, str]]) -> list[_Opened]:
    """One for each source; the same object where the same content comes again."""
    known: dict[Any, _Opened] = {}
    images: list[_Opened] = []
    for source, where in sources:
        key = source if isinstance(source, str | bytes) else id(source)
        if key not in known:
            known[key] = _Opened(open_image(source, where), where)
        images.append(known[key])
    return images
