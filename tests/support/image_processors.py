"""Images that tell every way of cutting apart, and the image processor of a folder with these numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire.renderer.image_processor import ImageProcessor


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def processor_of(folder: Path, numbers: Any, config: Mapping[str, Any]) -> ImageProcessor:
    """`numbers`: of preprocessor_config.json, which is written."""
    (folder / "preprocessor_config.json").write_text(json.dumps(numbers))
    processor = ImageProcessor.find(folder, config)
    assert processor is not None
    return processor
