"""Images of LLaVA NeXT: the whole as one square, and behind it the same larger, cut into tiles of that size.

The tiles are those of the resolution that fits an image best. The image stands in the middle of it; what is beyond the
image becomes no tokens. Called by the renderer, as any ImageProcessor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ModelError
from quire.messages import Media
from quire.renderer.cropped_images import CroppedImageProcessor
from quire.renderer.image_decoder import OpenedImage
from quire.renderer.images import View

_RESOLUTIONS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_MOST_TILES = 64


@dataclass(frozen=True, kw_only=True)
class FramedImageProcessor(CroppedImageProcessor):
    # of a tile, in pixels
    side: int
    # heights and widths in pixels, whole tiles
    resolutions: tuple[tuple[int, int], ...]

    @classmethod
    def _further(cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], side: int) -> dict[str, Any]:
        stated = [source.get("image_grid_pinpoints") for source in (given, hf_config)]
        pairs = next((pairs for pairs in stated if pairs is not None), _RESOLUTIONS)
        resolutions = tuple((int(height), int(width)) for height, width in pairs)
        if all(pairs is not None for pairs in stated) and stated[0] != stated[1]:
            raise ModelError(
                f"{file}: image_grid_pinpoints: differ from those of config.json. Take the files that belong to the "
                "model."
            )
        if not resolutions:
            raise ModelError(f"{file}: image_grid_pinpoints: is empty. Take the files that belong to the model.")
        for height, width in resolutions:
            is_whole = min(height, width) > 0 and not height % side and not width % side
            if not is_whole or not 1 <= height * width // side**2 <= _MOST_TILES:
                raise ModelError(
                    f"{file}: image_grid_pinpoints: {height} x {width} are no tiles of {side} x {side} pixels, from 1 "
                    f"to {_MOST_TILES} of them. Take the files that belong to the model."
                )
        return {"side": side, "resolutions": resolutions}

    @property
    def _cells_of_tile(self) -> int:
        return math.isqrt(self.max_pixels) // self.patch_size

    def _resolution(self, width: int, height: int) -> tuple[int, int]:
        """Height and width of the one that keeps most of an image; of several, the smallest that does."""

        def worth(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=worth)

    def _tiles(self, width: int, height: int) -> View:
        rows, columns = self._resolution(width, height)
        by_width, by_height = columns / width, rows / height
        if by_width < by_height:
            size = columns, min(math.ceil(height * by_width), rows)
        else:
            size = min(math.ceil(width * by_height), columns), rows
        left, upper = (columns - size[0]) // 2, (rows - size[1]) // 2
        return View(size, (-left, -upper, columns - left, rows - upper))

    def _margin(self, width: int, height: int) -> list[int]:
        """Cells beyond the image: above and below, left and right."""
        rows, columns = (pixels // self.side * self._cells_of_tile for pixels in self._resolution(width, height))
        if width / height > columns / rows:
            # a thin image has a row
            return [(rows - max(1, int(round(height * (columns / width), 7)))) // 2, 0]
        return [0, (columns - max(1, int(round(width * (rows / height), 7)))) // 2]

    def _frame(self, width: int, height: int) -> tuple[tuple[int, int], list[int]]:
        return self._resolution(width, height), self._margin(width, height)

    def _lengths(self, image: OpenedImage, where: str) -> list[int]:
        [whole] = super()._lengths(image, where)
        rows, columns = (pixels // self.side * self._cells_of_tile for pixels in self._resolution(*image.size))
        above, left = self._margin(*image.size)
        return [whole, (rows - 2 * above) * (columns - 2 * left + 1)]

    def _media(self, image: OpenedImage, where: str) -> list[Media]:
        square = View((self.side, self.side))
        frame = self._frame(*image.size)

        def show(width: int, height: int) -> list[View]:
            # one that turns out to lie on its side may have other tokens, even if as many: it has no tiles then
            return [square, self._tiles(width, height) if self._frame(width, height) == frame else View((1, 1))]

        whole, larger = image.views(show, self.resample)
        seen = self._cells_of_tile * self.patch_size
        if larger.shape[:2] != frame[0]:
            return [self._medium(whole[:seen, :seen])]
        rows, columns = (pixels // self.side for pixels in larger.shape[:2])
        tiles = larger.reshape(rows, self.side, columns, self.side, 3)[:, :seen, :, :seen]
        medium = self._medium(tiles.reshape(rows * seen, columns * seen, 3))
        margin = frame[1]
        cells = medium.cells[0] - 2 * margin[0], medium.cells[1] - 2 * margin[1]
        name = hashlib.sha256(f"tiles {margin} ".encode() + medium.content_hash)
        of_tiles = msgspec.structs.replace(
            medium, margin=margin, line_ends=1, length=cells[0] * (cells[1] + 1), content_hash=name.digest()
        )
        return [self._medium(whole[:seen, :seen]), of_tiles]
