"""Images of Pixtral: as many rows and columns of tokens as an image has, and a token of text at the end of each row.

Called by the renderer, as any ImageProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config.image_sizes import ImageSizes, image_token_of, longest_sides
from quire.messages import Media
from quire.renderer.image_decoder import OpenedImage
from quire.renderer.image_processor import ImageProcessor, check_ratio, check_steps, common_fields, ids_of_marks
from quire.renderer.patches import Pixels

if TYPE_CHECKING:
    from quire.renderer.tokenizer import Tokenizer
    from quire.renderer.video_processor import VideoTokens

_ROW_ENDS, _IMAGE_ENDS = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, kw_only=True)
class LinedImageProcessor(ImageProcessor):
    """Squares of merge_size x merge_size patches become one token each. An image that is no larger than `longest`
    (height and width) keeps its size, up to whole squares."""

    longest: tuple[int, int]
    row_end_id: int = -1
    image_end_id: int = -1

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> LinedImageProcessor:
        check_steps(given, ("do_resize", "do_rescale", "do_normalize"))
        return cls(
            image_token_id=image_token_of(hf_config),
            longest=longest_sides(given),
            **common_fields(given, sizes, max_images),
        )

    def with_tokens_of(self, tokenizer: Tokenizer) -> LinedImageProcessor:
        row_end, image_end = ids_of_marks(tokenizer, (_ROW_ENDS, _IMAGE_ENDS), "between")
        return replace(self, row_end_id=row_end, image_end_id=image_end)

    def expand(
        self,
        token_ids: list[int],
        sources: Sequence[tuple[Any, str]],
        max_tokens: int | None,
        videos: Sequence[VideoTokens] = (),
    ) -> tuple[list[int], list[Media]]:
        expanded, media = super().expand(token_ids, sources, max_tokens, videos)
        for image in media:
            line = image.cells[1] + image.line_ends
            for end in range(image.start + line, image.end + 1, line):
                expanded[end - 1] = self.row_end_id
            expanded[image.end - 1] = self.image_end_id
        return expanded, media

    def _lengths(self, image: OpenedImage, where: str) -> list[int]:
        width, height = self._resized(*image.size, where)
        cell = self.patch_size * self.merge_size
        return [height // cell * (width // cell + 1)]

    def _medium(self, pixels_HWC: Pixels) -> Media:
        medium = super()._medium(pixels_HWC)
        return msgspec.structs.replace(medium, line_ends=1, length=medium.length + medium.cells[0])

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        check_ratio(width, height, where)
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        cell = self.patch_size * self.merge_size
        # a line that is thinner than a pixel by then is one
        rows, columns = max(1, -(-height // cell)), max(1, -(-width // cell))
        most = self.max_pixels // cell**2
        if rows * columns > most:
            # more than the encoder may have in a step
            shrunk = math.sqrt(most / (rows * columns))
            rows, columns = max(1, math.floor(rows * shrunk)), max(1, math.floor(columns * shrunk))
            rows, columns = min(rows, most // columns or 1), min(columns, most)
        return columns * cell, rows * cell
