"""Values of the metadata of a GGUF file, by the keys of its architecture.

Owns the checks: a file cannot give a text where a size is meant. Called by `gguf_config.py`, `gguf_architectures.py`.
"""

from __future__ import annotations

import math
from typing import Any

from quire.config.gguf_file import GGUFFile
from quire.errors import ModelError


class GGUFValues:
    """Values of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def has(self, key: str) -> bool:
        return self.file.has(self.name(key))

    def optional(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(self.name(key), default)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.optional(key, default)
        # Some writers give a number for each layer.
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None:
            raise ModelError(f"{self.file.path}: no {self.name(key)} there, which this architecture needs.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            shown = str(value)[:60]
            raise ModelError(f"{self.file.path}: {self.name(key)}={shown} must be a whole number of at least 1.")
        return value

    def count(self, key: str) -> int:
        """A whole number that may be 0, and is if it is not there."""
        return self.whole(key) if self.optional(key, 0) not in (0, [0]) else 0

    def number(self, key: str, default: float | None = None) -> float:
        value = self.optional(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0.0 < value < math.inf:
            raise ModelError(f"{self.file.path}: {self.name(key)}={str(value)[:60]} must be a number above 0.")
        return float(value)
