"""Images of InternVL: one is resized to some rows and columns of squares, which the tower sees one by one, and behind
them it sees all of the image as one square.

Each square is a medium of its own: it is named, encoded within the budget and kept by itself. Called by the renderer,
as any ImageProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.image_sizes import ImageSizes, image_token_of
from quire.messages import Media
from quire.renderer.image_decoder import OpenedImage
from quire.renderer.image_processor import ImageProcessor, check_steps, common_fields, ids_of_marks
from quire.renderer.images import MOST_PIXELS, View

if TYPE_CHECKING:
    from quire.renderer.tokenizer import Tokenizer

_OPENING, _CLOSING = "<img>", "</img>"
_MOST_TILES = 256


@dataclass(frozen=True, kw_only=True)
class TiledImageProcessor(ImageProcessor):
    """Squares of merge_size x merge_size patches of a tile become one token each."""

    # tiles of an image, that of the whole not counted
    fewest: int
    most: int

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> TiledImageProcessor:
        check_steps(given, ("do_resize", "do_rescale", "do_normalize"))
        fewest, most = int(given.get("min_patches", 1)), int(given.get("max_patches", 12))
        highest = min(_MOST_TILES, MOST_PIXELS // sizes.max_pixels)
        if not 1 <= fewest <= most <= highest:
            raise ValueError(
                f"min_patches={fewest}, max_patches={most}: must be from 1 to {highest}, the second the greater one."
            )
        return cls(
            image_token_id=image_token_of(hf_config),
            fewest=fewest,
            most=most,
            **common_fields(given, sizes, max_images),
        )

    def with_tokens_of(self, tokenizer: Tokenizer) -> TiledImageProcessor:
        opening, closing = ids_of_marks(tokenizer, (_OPENING, _CLOSING), "around")
        return replace(self, opening=(opening,), closing=(closing,))

    def _lengths(self, image: OpenedImage, where: str) -> list[int]:
        columns, rows = self._tiles(*image.size)
        length = self.max_pixels // (self.patch_size * self.merge_size) ** 2
        return [length] * (columns * rows + (columns * rows > 1))

    def _media(self, image: OpenedImage, where: str) -> list[Media]:
        side = math.isqrt(self.max_pixels)
        columns, rows = self._tiles(*image.size)

        def show(width: int, height: int) -> list[View]:
            # one that turns out to lie on its side has as many tiles as were counted
            across, down = (columns, rows) if (width, height) == image.size else (rows, columns)
            whole = [View((side, side))] if columns * rows > 1 else []
            return [View((across * side, down * side)), *whole]

        tiled_HWC, *whole_HWC = image.views(show, self.resample)
        tiles = [
            tiled_HWC[top : top + side, left : left + side]
            for top in range(0, tiled_HWC.shape[0], side)
            for left in range(0, tiled_HWC.shape[1], side)
        ]
        return [self._medium(pixels_HWC) for pixels_HWC in [*tiles, *whole_HWC]]

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """How many columns and rows have the ratio that is closest to that of the image. Of those that are equally
        close the largest that the image would fill by more than half."""
        ratio, num_pixels = width / height, width * height
        grids = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most // columns + 1)
            if columns * rows >= self.fewest
        ]
        best, least_off = (1, 1), math.inf
        for columns, rows in sorted(grids, key=math.prod):
            off = abs(ratio - columns / rows)
            if off < least_off or (off == least_off and num_pixels > 0.5 * self.max_pixels * columns * rows):
                best, least_off = (columns, rows), off
        return best
