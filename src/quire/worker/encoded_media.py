"""What an encoder made of images and sounds, kept by content and bounded in bytes.

The last one is kept in any case: its row may be in the middle of it. Owned by the rows of a model that has an encoder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.messages import Media, StepOutput


class EncodedMedia:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_key: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self._num_bytes = 0
        self._num_encoded = 0
        self._num_reported = 0
        self._num_hits = 0

    def of(self, media: Media, encode: Callable[[], Tensor]) -> Tensor:
        """[length, hidden]; each alone, so that its bits do not depend on the others of a step."""
        key = (media.content_hash, *media.shape, *media.grid, *media.margin)
        known = self._by_key.get(key)
        if known is not None:
            self._by_key.move_to_end(key)
            self._num_hits += 1
            return known
        encoded = encode()
        self._num_encoded += 1
        self._by_key[key] = encoded
        self._num_bytes += encoded.nbytes
        while self._num_bytes > self._most_bytes and len(self._by_key) > 1:
            self._num_bytes -= self._by_key.popitem(last=False)[1].nbytes
        return encoded

    def clear(self) -> None:
        self._by_key.clear()
        self._num_bytes = 0

    def report(self, output: StepOutput) -> None:
        """How many were encoded since the last report."""
        if num_encoded := self._num_encoded - self._num_reported:
            output.counts["num_images_encoded"] = num_encoded
            self._num_reported = self._num_encoded

    def statistics(self) -> dict[str, float]:
        return {
            "num_images_encoded": self._num_encoded,
            "num_image_cache_hits": self._num_hits,
            "image_cache_bytes": self._num_bytes,
        }
