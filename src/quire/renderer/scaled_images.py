"""Images of Gemma 4, which are made as large as a number of tokens allows and keep their ratio.

In a prompt one mark stands for an image; tokens that open and close it are written around its own. Called by the
renderer, as any ImageProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.image_sizes import ImageSizes
from quire.renderer.image_processor import ImageProcessor, check_steps, common_fields

_ZEROS, _ONES = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ScaledImageProcessor(ImageProcessor):
    """Squares of merge_size x merge_size patches become one token each."""

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> ScaledImageProcessor:
        check_steps(given)
        if not given.get("do_normalize", False):
            # levels from 0 to 1 are what the tower takes
            given = {**given, "image_mean": _ZEROS, "image_std": _ONES}
        text = hf_config.get("text_config") or {}
        return cls(
            image_token_id=int(hf_config.get("image_token_id", 258_880)),
            opening=(int(hf_config.get("boi_token_id", 255_999)),),
            closing=(int(hf_config.get("eoi_token_id", 258_882)),),
            is_whole=text.get("use_bidirectional_attention") == "vision",
            **common_fields(given, sizes, max_images, mean=_ZEROS, std=_ONES),
        )

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        """In whole squares, and as many of them as there may be tokens, if the ratio allows."""
        side = self.patch_size * self.merge_size
        most = self.max_pixels // side**2
        factor = math.sqrt(self.max_pixels / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        # a line of squares; rounding may leave nothing of a single one
        if rows == 0:
            rows, columns = 1, max(1, min(width // height, most))
        elif columns == 0:
            rows, columns = min(height // width, most), 1
        return columns * side, rows * side
