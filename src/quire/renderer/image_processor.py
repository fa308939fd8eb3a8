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

from quire.errors import ModelError, RequestError
from quire.messages import Media
from quire.renderer.images import image_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.renderer.tokenizer import Tokenizer

# What a client writes in a message, and under which name the image stands there.
_PARTS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_POOLED = "gemma3"
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
    max_images: int = 8
    # Pillow's number
    resample: int = 3
    # its tokens see each other
    is_whole: bool = False

    @classmethod
    def find(cls, folder: Path, hf_config: Mapping[str, Any]) -> ImageProcessor | None:
        """That of a checkpoint; None where the model takes no images."""
        is_pooled = hf_config.get("model_type") == _POOLED and "vision_config" in hf_config
        is_known = hf_config.get("model_type") in MODEL_TYPES and "image_token_id" in hf_config
        if not is_known and not is_pooled:
            return None
        file = folder / "preprocessor_config.json"
        try:
            given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if is_pooled:
                from quire.renderer.pooled_images import PooledImageProcessor

                return PooledImageProcessor.read(file, given, hf_config)
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
            )
        except ModelError:
            raise
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

    def set_apart(self, pieces: list[str], tokenizer: Tokenizer) -> list[str]:
        """A text whose marks of images stand as the model has learned them."""
        return pieces

    def expand(
        self, token_ids: list[int], sources: Sequence[tuple[Any, str]], max_tokens: int | None
    ) -> tuple[list[int], list[Media]]:
        """Each placeholder becomes as many as its image has tokens."""
        param = "messages" if sources and sources[0][1].startswith("messages") else "multi_modal_data"
        if len(sources) > self.max_images:
            raise RequestError(
                f"{param}: {len(sources)} images, at most {self.max_images} are allowed in a request.", param=param
            )
        count = token_ids.count(self.image_token_id)
        if count != len(sources):
            raise RequestError(
                f"{param}: {len(sources)} images for {count} placeholders in the prompt. Each image needs one, which "
                "the chat template writes for the images of a chat.",
                param=param,
            )
        given = iter(sources)
        media: list[Media] = []
        expanded: list[int] = []
        for token in token_ids:
            if token != self.image_token_id:
                expanded.append(token)
                continue
            room = None if max_tokens is None else max_tokens - len(expanded)
            media.append(self._media(*next(given), len(expanded), room))
            expanded += [token] * media[-1].length
        return expanded, media

    def _media(self, source: Any, where: str, start: int, room: int | None) -> Media:
        image = image_of(source, where)
        height, width = self._resized(image, where)
        side = self.patch_size
        grid = [1, height // side, width // side]
        length = grid[1] * grid[2] // self.merge_size**2
        if room is not None and length > room:
            raise RequestError(
                f"{where}: the image becomes {length} tokens, and the model's context has room for {max(0, room)} "
                "more. Make it smaller.",
                param=where,
                code="context_length_exceeded",
            )
        pixels = self.patches(image, height, width)
        content = pixels.tobytes()
        # shape and type belong to the name: the same bytes in another shape are another image
        head = f"image {pixels.dtype} {pixels.shape} {grid} ".encode()
        return Media(
            start=start,
            length=length,
            pixels=content,
            shape=list(pixels.shape),
            grid=grid,
            merge_size=self.merge_size,
            content_hash=hashlib.sha256(head + content).digest(),
            is_whole=self.is_whole,
        )

    def _resized(self, image: Image, where: str) -> tuple[int, int]:
        """Height and width in whole cells, with about the same ratio and a bounded number of pixels."""
        width, height = image.size
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

    def patches(self, image: Image, height: int, width: int) -> npt.NDArray[np.float32]:
        """[patches, channels * temporal * side * side], cell by cell."""
        from PIL.Image import Resampling

        resized = image.resize((width, height), resample=Resampling(self.resample))
        pixels_HWC: npt.NDArray[Any] = np.asarray(resized, dtype=np.float32) * np.float32(1 / 255)
        pixels_HWC = (pixels_HWC - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        side, merge, times = self.patch_size, self.merge_size, self.temporal_patch_size
        rows, columns = height // side // merge, width // side // merge
        cells = pixels_HWC.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        # a still image is shown to the encoder as so many equal frames
        cells = np.repeat(cells[..., None, :, :], times, axis=5)
        return np.ascontiguousarray(cells.reshape(rows * columns * merge**2, -1), dtype=np.float32)
