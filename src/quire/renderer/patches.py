"""How pixels are cut for encoders that take patches cell by cell."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def patches_of(pixels_HWC: Pixels, side: int, merge: int) -> Pixels:
    """[patches, colours, side * side], cell by cell of merge x merge patches."""
    height, width, _ = pixels_HWC.shape
    rows, columns = height // side // merge, width // side // merge
    cells = pixels_HWC.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(cells).reshape(rows * columns * merge**2, 3, side * side)
