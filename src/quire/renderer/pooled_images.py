"""Images of models that bring every one to the same square and the same number of tokens, as Gemma 3 does.

In a prompt one mark stands for an image: it opens the image's tokens, another one closes them, and empty lines stand
around both. Called by the renderer, as any ImageProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.image_sizes import ImageSizes
from quire.errors import ModelError
from quire.messages import Media
from quire.renderer.image_processor import ImageProcessor, common_fields
from quire.renderer.tokenizer import Tokenizer
from quire.renderer.video_processor import VideoTokens

_HALVES = (0.5, 0.5, 0.5)
# Pillow's number
_BILINEAR = 2


@dataclass(frozen=True, kw_only=True)
class PooledImageProcessor(ImageProcessor):
    """Squares of merge_size x merge_size patches become one token each; those of an image see each other."""

    opening_id: int
    closing_id: int
    mean: Sequence[float] = _HALVES
    std: Sequence[float] = _HALVES
    resample: int = _BILINEAR
    is_whole: bool = True

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> PooledImageProcessor:
        if given.get("do_pan_and_scan"):
            raise ModelError(f"{file}: do_pan_and_scan=true: pieces of an image are not built. Set it to false.")
        return cls(
            image_token_id=int(hf_config.get("image_token_index", 262_144)),
            opening_id=int(hf_config.get("boi_token_index", 255_999)),
            closing_id=int(hf_config.get("eoi_token_index", 256_000)),
            **common_fields(given, sizes, max_images, mean=_HALVES, std=_HALVES, resample=_BILINEAR),
        )

    def set_apart(self, pieces: list[str], tokenizer: Tokenizer) -> list[str]:
        opening, closing = (
            tokenizer.decode([token], skip_special_tokens=False) for token in (self.opening_id, self.closing_id)
        )
        return [piece.replace(opening, f"\n\n{opening}{closing}\n\n") for piece in pieces]

    def expand(
        self,
        token_ids: list[int],
        sources: Sequence[tuple[Any, str]],
        max_tokens: int | None,
        videos: Sequence[VideoTokens] = (),
    ) -> tuple[list[int], list[Media]]:
        opened: list[int] = []
        for token, following in zip(token_ids, [*token_ids[1:], None], strict=True):
            opened.append(token)
            if token == self.opening_id:
                opened.append(self.image_token_id)
                if following != self.closing_id:
                    opened.append(self.closing_id)
        return super().expand(opened, sources, max_tokens, videos)

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        side = math.isqrt(self.max_pixels)
        return side, side
