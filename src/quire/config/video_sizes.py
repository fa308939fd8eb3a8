"""How the frames of a checkpoint's videos are cut: numbers of its video processor's file and of config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.image_sizes import not_valid, read_preprocessor, whole_cells
from quire.errors import ModelError

_FILE = "video_preprocessor_config.json"
# of all frames of the longest video together: as much is read from a decoder at a time
_MOST_PIXELS = 32 << 20


@dataclass(frozen=True)
class VideoSizes:
    """`temporal_patch_size` frames, one after the other, are cut and encoded as one image is."""

    min_pixels: int
    max_pixels: int
    # the bounds are those of all frames together
    bounds_whole: bool
    # The time of frames stands in the text before them; otherwise a second is so many positions.
    has_timestamps: bool
    positions_per_second: float
    temporal_patch_size: int
    cell_side: int
    # tokens that the encoder makes at a time
    max_tokens: int

    @classmethod
    def read(
        cls, folder: Path, hf_config: Mapping[str, Any], side: int, temporal_patch_size: int, max_tokens: int
    ) -> tuple[VideoSizes, Mapping[str, Any]] | None:
        """With the file that they stand in; None where the model takes no videos."""
        family = _FAMILIES.get(str(hf_config.get("model_type")))
        if family is None:
            return None
        given = _given(folder)
        size = given.get("size") or {}
        try:
            sizes = cls(
                min_pixels=int(given.get("min_pixels") or size.get("shortest_edge") or 128 * side**2),
                max_pixels=int(given.get("max_pixels") or size.get("longest_edge") or 768 * side**2),
                bounds_whole=family.bounds_whole,
                has_timestamps=family.has_timestamps,
                positions_per_second=float(
                    (hf_config.get("vision_config") or {}).get("tokens_per_second") or family.positions_per_second
                ),
                temporal_patch_size=temporal_patch_size,
                cell_side=side,
                max_tokens=max_tokens,
            )
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise not_valid(folder / _FILE, error) from error
        if not 1 <= sizes.min_pixels <= sizes.max_pixels or not 0 <= sizes.positions_per_second <= 1000:
            raise ModelError(
                f"{folder / _FILE}: min_pixels={sizes.min_pixels}, max_pixels={sizes.max_pixels}: must be at least 1, "
                "the second the greater one, and tokens_per_second of config.json from 0 to 1000. Take the files that "
                "belong to the model."
            )
        return sizes, given

    def frame_size(self, width: int, height: int, num_frames: int, num_videos: int) -> tuple[int, int]:
        """Width and height in whole cells. `num_videos`: of the request, which share the room for pixels."""
        per_frame = min(self.max_tokens * self.cell_side**2, _MOST_PIXELS // num_videos // num_frames)
        num_counted = 1
        if self.bounds_whole:
            shorter = min(width, height)
            if shorter < self.cell_side:
                scale = self.cell_side / shorter
                width, height = int(width * scale), int(height * scale)
            num_frames = max(num_frames, self.temporal_patch_size)
            num_counted = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        else:
            num_frames = 1
        most = min(self.max_pixels, per_frame * num_counted)
        return whole_cells(width, height, self.cell_side, min(self.min_pixels, most), most, num_frames, num_counted)


@dataclass(frozen=True)
class _Family:
    bounds_whole: bool
    has_timestamps: bool
    positions_per_second: float = 0.0


_FAMILIES = {
    "qwen2_5_vl": _Family(bounds_whole=False, has_timestamps=False, positions_per_second=4.0),
    "qwen3_vl": _Family(bounds_whole=True, has_timestamps=True),
    "qwen3_vl_moe": _Family(bounds_whole=True, has_timestamps=True),
}
# Models that take videos.
MODEL_TYPES = tuple(_FAMILIES)


def _given(folder: Path) -> Mapping[str, Any]:
    """The first file that there is: models without one of videos have the numbers of images."""
    for name, key in ((_FILE, None), ("processor_config.json", "video_processor")):
        file = folder / name
        try:
            given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except ValueError as error:
            raise not_valid(file, error) from error
        given = given.get(key) if key is not None and isinstance(given, dict) else given
        if given:
            if not isinstance(given, dict):
                raise not_valid(file, TypeError("no object"))
            return given
    found: Mapping[str, Any] = read_preprocessor(folder)
    return found
