"""From videos to what the engine gets: frames become media one after the other, as images do, each with its time.

An encoder sees `temporal_patch_size` frames at a time and nothing of the others, so these are one medium: chunks, the
encoder's budget and what is kept of its work know no videos. Called by ImageProcessor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quire.config.images import VideoConfig
from quire.config.video_sizes import VideoSizes
from quire.errors import RequestError
from quire.messages import Media
from quire.renderer.image_parts import Source
from quire.renderer.image_processor import ImageProcessor, colours_of, param_of
from quire.renderer.patches import patches_of
from quire.renderer.videos import OpenedVideo, Pixels, VideoDecoder

if TYPE_CHECKING:
    from quire.renderer.tokenizer import Tokenizer

_MOST_RATIO = 200
# Pillow's number
_BICUBIC = 3
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class VideoProcessor:
    sizes: VideoSizes
    token_id: int
    opening_id: int
    closing_id: int
    patch_size: int
    merge_size: int
    mean: Sequence[float]
    std: Sequence[float]
    config: VideoConfig
    decoder: VideoDecoder

    @classmethod
    def find(
        cls,
        folder: Path,
        hf_config: Mapping[str, Any],
        images: ImageProcessor,
        max_tokens: int | None,
        config: VideoConfig,
    ) -> VideoProcessor | None:
        """That of a checkpoint; None where the model takes no videos."""
        side = images.patch_size * images.merge_size
        most = max_tokens or images.max_pixels // side**2
        found = VideoSizes.read(folder, hf_config, side, images.temporal_patch_size, most)
        if found is None:
            return None
        sizes, given = found
        return cls(
            sizes=sizes,
            token_id=int(hf_config.get("video_token_id", 151_656)),
            opening_id=int(hf_config.get("vision_start_token_id", 151_652)),
            closing_id=int(hf_config.get("vision_end_token_id", 151_653)),
            patch_size=images.patch_size,
            merge_size=images.merge_size,
            mean=colours_of(given, "image_mean", images.mean),
            std=colours_of(given, "image_std", images.std),
            config=config,
            decoder=VideoDecoder(config, images.decoder),
        )

    def check_limit(self, sources: Sequence[Source]) -> None:
        if len(sources) > self.config.max_videos:
            param = param_of(sources)
            raise RequestError(
                f"{param}: {len(sources)} videos, at most {self.config.max_videos} are allowed in a request "
                "(limit_mm_per_prompt). Send fewer.",
                param=param,
            )

    def open(self, sources: Sequence[Source]) -> list[VideoTokens]:
        """All headers are read, and what is too much is refused, before anything else is decoded."""
        opened = [self.decoder.open(source, where) for source, where in sources]
        return [self._tokens_of(video, len(opened)) for video in opened]

    def _tokens_of(self, video: OpenedVideo, num_videos: int) -> VideoTokens:
        width, height = video.size
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise RequestError(
                f"{video.where}: the video is {width} x {height} pixels; its sides may differ by a factor of "
                f"{_MOST_RATIO} at most. Cut it.",
                param=video.where,
            )
        sizes = self.sizes
        count = len(video.timing.numbers)
        size = sizes.frame_size(width, height, count, num_videos)
        length = size[0] * size[1] // sizes.cell_side**2
        tokens = VideoTokens(video, size, length, -(-count // sizes.temporal_patch_size))
        self._offsets(tokens)
        return tokens

    def text_with_times(self, pieces: list[str], videos: Sequence[VideoTokens], tokenizer: Tokenizer) -> list[str]:
        """A text in which each mark of a video has become one for each of its media, with their times, if the model has
        learned these from the text."""
        if not self.sizes.has_timestamps or not videos:
            return pieces
        mark = self._text_of(self.token_id, tokenizer)
        self.check_marks(videos, len(videos), sum(piece.count(mark) for piece in pieces))
        left = iter(videos)
        written = []
        for piece in pieces:
            head, *others = piece.split(mark)
            written.append(head + "".join(self._written(next(left), tokenizer) + other for other in others))
        return written

    def tokens_with_times(
        self, token_ids: list[int], videos: Sequence[VideoTokens], tokenizer: Tokenizer | None
    ) -> list[int]:
        """The same of tokens."""
        if not self.sizes.has_timestamps or not videos:
            return token_ids
        if tokenizer is None:
            raise RequestError(
                "multi_modal_data.video: the times of frames need a tokenizer.", param="multi_modal_data"
            )
        self.check_marks(videos, len(videos), token_ids.count(self.token_id))
        left = iter(videos)
        written: list[int] = []
        for token in token_ids:
            is_mark = token == self.token_id
            written += (
                tokenizer.encode(self._written(next(left), tokenizer), add_special_tokens=False) if is_mark else [token]
            )
        return written

    @staticmethod
    def check_marks(videos: Sequence[VideoTokens], wanted: int, count: int) -> None:
        if count != wanted:
            param = param_of([(None, videos[0].video.where)])
            raise RequestError(
                f"{param}: {len(videos)} videos need {wanted} placeholders in the prompt, and there are {count}. The "
                "chat template writes one for each video of a chat.",
                param=param,
            )

    def _written(self, video: VideoTokens, tokenizer: Tokenizer) -> str:
        marks = (self.opening_id, self.token_id, self.closing_id)
        frames = "".join(self._text_of(token, tokenizer) for token in marks)
        return "".join(f"<{seconds:.1f} seconds>{frames}" for seconds in self._seconds(video))

    def _seconds(self, video: VideoTokens) -> Iterator[float]:
        """Of each medium: between its first frame and its last."""
        timing = video.video.timing
        for numbers in _together(timing.numbers, self.sizes.temporal_patch_size):
            yield (numbers[0] / timing.rate + numbers[-1] / timing.rate) / 2

    @staticmethod
    def _text_of(token: int, tokenizer: Tokenizer) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    def by_mark(self, media: list[_T]) -> list[list[_T]]:
        """Of a video, those that stand for each mark."""
        return [[one] for one in media] if self.sizes.has_timestamps else [media]

    def media_of(self, video: VideoTokens) -> Iterator[Media]:
        """One after the other; where they stand is still open."""
        frames = video.video.frames(video.size, _BICUBIC)
        for offset, together in zip(
            self._offsets(video), _together(frames, self.sizes.temporal_patch_size), strict=True
        ):
            missing = self.sizes.temporal_patch_size - len(together)
            yield self._medium([*together, *[together[-1]] * missing], offset)

    def _offsets(self, video: VideoTokens) -> list[int | None]:
        """Positions by which each medium stands behind the first one, where time is a matter of positions. They may be
        too far apart: positions never run ahead of tokens, as a model has as many of these as of those."""
        if self.sizes.has_timestamps:
            return [None] * video.num_media
        seconds = np.float32(self.sizes.temporal_patch_size / video.video.timing.sampled_rate)
        step = np.float32(self.sizes.positions_per_second) * seconds
        offsets = [int(np.float32(number) * step) for number in range(video.num_media)]
        if any(offset >= (number + 1) * video.length for number, offset in enumerate(offsets)):
            raise RequestError(
                f"{video.video.where}: its frames are {seconds / self.sizes.temporal_patch_size:.3g} s apart, too "
                f"far for {video.length} tokens of each {self.sizes.temporal_patch_size}. Send more frames, or larger "
                "ones.",
                param=video.video.where,
            )
        return [None, *offsets[1:]]

    def _medium(self, frames: Sequence[Pixels], time: int | None) -> Media:
        height, width, _ = frames[0].shape
        patches_PCFS = np.stack([patches_of(frame, self.patch_size, self.merge_size) for frame in frames], axis=2)
        pixels = patches_PCFS.reshape(len(patches_PCFS), 3, -1)
        grid = [1, height // self.patch_size, width // self.patch_size]
        content = pixels.tobytes()
        # what is beside the bytes belongs to the name, as it does of images
        numbers = (pixels.dtype.name, pixels.shape, grid, tuple(self.mean), tuple(self.std), len(frames))
        name = hashlib.sha256(f"frames {numbers} ".encode())
        name.update(content)
        return Media(
            start=0,
            length=grid[1] * grid[2] // self.merge_size**2,
            pixels=content,
            shape=list(pixels.shape),
            mean=list(self.mean),
            std=list(self.std),
            grid=grid,
            merge_size=self.merge_size,
            content_hash=name.digest(),
            time=time,
        )


@dataclass(frozen=True)
class VideoTokens:
    """A video, and what it will be."""

    video: OpenedVideo
    # width and height of a frame
    size: tuple[int, int]
    # tokens of each of so many media
    length: int
    num_media: int


def _together(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """So many at a time, of the last ones fewer."""
    left = iter(items)
    while together := list(islice(left, size)):
        yield together
