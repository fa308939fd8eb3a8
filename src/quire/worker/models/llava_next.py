"""LLaVA NeXT (1.6): LLaVA that sees an image whole and in tiles, whose rows of cells end with a vector of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.layers import make_parameter
from quire.worker.models.llava import LlavaForConditionalGeneration


class RowEnd(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = make_parameter(size)

    def forward(self, rows_RCE: Tensor) -> Tensor:
        """[R * (C + 1), E]: one behind each row."""
        ends_R1E = self.weight.to(rows_RCE.dtype).expand(len(rows_RCE), 1, -1)
        return torch.cat((rows_RCE, ends_R1E), dim=1).flatten(0, 1)


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    architectures = ("LlavaNextForConditionalGeneration",)
    image_modules = (*LlavaForConditionalGeneration.image_modules, "image_newline")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.image_newline = RowEnd(config.text.hidden_size)
        self.cells_of_tile = config.vision.image_size // config.vision.patch_size

    def encode_image(self, pixels: Tensor, grid: list[int]) -> Tensor:
        """Of the whole image what LLaVA makes; of tiles, which have margins, the cells within these, row by row."""
        time, height, width, *margin = grid
        if not margin:
            return super().encode_image(pixels, grid)
        side = self.cells_of_tile
        rows, columns = height // side, width // side
        tiles = pixels.view(rows, side, columns, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        encode = super().encode_image
        encoded = torch.stack([encode(tile, [time, side, side]) for tile in tiles])
        cells = encoded.view(rows, columns, side, side, -1).transpose(1, 2).reshape(height, width, -1)
        above, left = margin
        ended: Tensor = self.image_newline(cells[above : height - above, left : width - left])
        return ended


MODEL = LlavaNextForConditionalGeneration
