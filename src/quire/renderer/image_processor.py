"""From decoded images to what the engine gets: patches for the encoder, and placeholders among the tokens.

One class for each way in which models cut images; Qwen's families share
this one. Called by the renderer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from quire.config.image_sizes import (
    INTERN,
    PIXTRAL,
    ImageSizes,
    joined_tower,
    not_valid,
    preprocessor_file,
    read_preprocessor,
    whole_cells,
)
from quire.config.images import MOST_IMAGES, VideoConfig
from quire.errors import ModelError, RequestError
from quire.messages import Media
from quire.renderer.image_decoder import ImageDecoder, OpenedImage
from quire.renderer.image_parts import Source, Sources
from quire.renderer.patches import Pixels, patches_of

if TYPE_CHECKING:
    from quire.renderer.tokenizer import Tokenizer
    from quire.renderer.video_processor import VideoProcessor, VideoTokens

_MOST_RATIO = 200
# Pillow's number
_BICUBIC = 3
_FILTERS = range(6)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class _Key(NamedTuple):
    """A medium of an image or a video of a request: an encoder may see these piece by piece."""

    kind: str
    whole: Any
    place: int


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """Qwen's: an image is resized to whole cells of merge_size x merge_size patches; each cell is one token."""

    image_token_id: int
    patch_size: int = ImageSizes.patch_size
    merge_size: int = ImageSizes.merge_size
    temporal_patch_size: int = ImageSizes.temporal_patch_size
    min_pixels: int = ImageSizes.min_pixels
    max_pixels: int = ImageSizes.max_pixels
    mean: Sequence[float] = CLIP_MEAN
    std: Sequence[float] = CLIP_STD
    max_images: int = MOST_IMAGES
    decoder: ImageDecoder = field(default_factory=ImageDecoder)
    # Pillow's number
    resample: int = _BICUBIC
    # its tokens see each other
    is_whole: bool = False
    # tokens before those of an image, and behind them
    opening: Sequence[int] = ()
    closing: Sequence[int] = ()
    # None: the model takes no videos
    videos: VideoProcessor | None = None

    @classmethod
    def find(
        cls,
        folder: Path,
        hf_config: Mapping[str, Any],
        max_images: int = MOST_IMAGES,
        max_image_tokens: int | None = None,
        videos: VideoConfig | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> ImageProcessor | None:
        """That of a checkpoint; None where the model takes no images."""
        sizes = ImageSizes.read(folder, hf_config)
        if sizes is None:
            return None
        if max_image_tokens is not None:
            sizes = sizes.within(max_image_tokens)
        given = read_preprocessor(folder)
        file = preprocessor_file(folder)
        try:
            processor = _class_for(hf_config).read(file, given, hf_config, sizes, max_images)
            from quire.renderer.video_processor import VideoProcessor

            config = videos or VideoConfig()
            of_videos = VideoProcessor.find(folder, hf_config, processor, max_image_tokens, config)
            processor = dataclasses.replace(processor, videos=of_videos)
            return processor if tokenizer is None else processor.with_tokens_of(tokenizer)
        except ModelError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            raise not_valid(file, error) from error

    @classmethod
    def read(
        cls, file: Path, given: Mapping[str, Any], hf_config: Mapping[str, Any], sizes: ImageSizes, max_images: int
    ) -> ImageProcessor:
        """`given`: the numbers for images in that file. ValueError and its like: they are none."""
        return cls(image_token_id=int(hf_config["image_token_id"]), **common_fields(given, sizes, max_images))

    def with_tokens_of(self, tokenizer: Tokenizer) -> ImageProcessor:
        """The same, knowing the tokens of text that it writes."""
        return self

    def open(self, sources: Sources) -> OpenedMedia:
        """Of videos, all headers are read, and what is too much is refused: their times stand in the text."""
        self.check_limits(sources)
        videos = self.videos.open(sources.videos) if self.videos is not None and sources.videos else []
        return OpenedMedia(self, sources.images, videos)

    def close(self) -> None:
        """Ends what works for it beside this process; it may be used again."""
        self.decoder.close()
        if self.videos is not None:
            self.videos.decoder.close()

    def set_apart(self, pieces: list[str], tokenizer: Tokenizer) -> list[str]:
        """A text whose marks of images stand as the model has learned them."""
        return pieces

    def expand(
        self,
        token_ids: list[int],
        sources: Sequence[tuple[Any, str]],
        max_tokens: int | None,
        videos: Sequence[VideoTokens] = (),
    ) -> tuple[list[int], list[Media]]:
        """Each placeholder becomes as many as its image or its video has tokens. All headers are read, and what does
        not fit is refused, before the first image is decoded. `videos`: whose times are written already."""
        _check_placeholders(sources, token_ids.count(self.image_token_id))
        images = [(self.decoder.open(source, where), where) for source, where in sources]
        given = iter(images)
        marks = iter(self._marks(videos, token_ids))
        video_token_id = self.videos.token_id if self.videos is not None and videos else None
        # for each medium where it begins, and which it is
        starts: list[tuple[int, Any]] = []
        expanded: list[int] = []
        for token in token_ids:
            if token == self.image_token_id:
                image, where = next(given)
                kind = "image"
                lengths = [
                    (length, _Key(kind, image.key, place)) for place, length in enumerate(self._lengths(image, where))
                ]
                expanded += self.opening
            elif token == video_token_id:
                kind = "video"
                where, lengths = next(marks)
            else:
                expanded.append(token)
                continue
            if max_tokens is not None:
                _check_room(sum(length for length, _ in lengths), max_tokens - len(expanded), where, kind)
            for length, key in lengths:
                starts.append((len(expanded), key))
                expanded += [token] * length
            if kind == "image":
                expanded += self.closing
        media: dict[Any, Media] = {}
        for image, where in images:
            if _Key("image", image.key, 0) not in media:
                pieces = self._media(image, where)
                if [piece.length for piece in pieces] != self._lengths(image, where):
                    raise RequestError(
                        f"{where}: only behind its pixels the image says that it lies on its side, and turned it has "
                        "another number of tokens. Send it upright.",
                        param=where,
                    )
                media |= {_Key("image", image.key, place): medium for place, medium in enumerate(pieces)}
        for number, video in enumerate(videos):
            assert self.videos is not None
            media |= {_Key("video", number, place): one for place, one in enumerate(self.videos.media_of(video))}
        return expanded, [replace(media[key], start=start) for start, key in starts]

    def _marks(self, videos: Sequence[VideoTokens], token_ids: list[int]) -> list[tuple[str, list[tuple[int, Any]]]]:
        """For each placeholder where its video was given, and the media that stand for it."""
        if self.videos is None or not videos:
            return []
        marks: list[tuple[str, list[tuple[int, Any]]]] = []
        for number, video in enumerate(videos):
            media = [(video.length, _Key("video", number, place)) for place in range(video.num_media)]
            marks += [(video.video.where, of_mark) for of_mark in self.videos.by_mark(media)]
        self.videos.check_marks(videos, len(marks), token_ids.count(self.videos.token_id))
        return marks

    def check_limits(self, sources: Sources) -> None:
        if len(sources.images) > self.max_images:
            param = param_of(sources.images)
            raise RequestError(
                f"{param}: {len(sources.images)} images, at most {self.max_images} are allowed in a request "
                "(limit_mm_per_prompt). Send fewer.",
                param=param,
            )
        if self.videos is None and sources.videos:
            where = sources.videos[0][1]
            raise RequestError(f"{where}: this model takes images and no videos. Send frames as images.", param=where)
        if self.videos is not None:
            self.videos.check_limit(sources.videos)

    def _lengths(self, image: OpenedImage, where: str) -> list[int]:
        """Tokens of each piece that the encoder sees by itself, of an image that stands as its header says."""
        width, height = self._resized(*image.size, where)
        return [height * width // (self.patch_size * self.merge_size) ** 2]

    def _media(self, image: OpenedImage, where: str) -> list[Media]:
        """These pieces."""
        return [self._medium(image.pixels(lambda width, height: self._resized(width, height, where), self.resample))]

    def _medium(self, pixels_HWC: Pixels) -> Media:
        height, width, _ = pixels_HWC.shape
        pixels = patches_of(pixels_HWC, self.patch_size, self.merge_size)
        grid = [1, height // self.patch_size, width // self.patch_size]
        content = pixels.tobytes()
        # what is beside the bytes belongs to the name: the same bytes in another shape are another image
        numbers = (pixels.dtype.name, pixels.shape, grid, tuple(self.mean), tuple(self.std), self.temporal_patch_size)
        name = hashlib.sha256(f"image {numbers} ".encode())
        name.update(content)
        return Media(
            start=0,
            length=grid[1] * grid[2] // self.merge_size**2,
            pixels=content,
            shape=list(pixels.shape),
            mean=list(self.mean),
            std=list(self.std),
            num_frames=self.temporal_patch_size,
            grid=grid,
            merge_size=self.merge_size,
            content_hash=name.digest(),
            is_whole=self.is_whole,
        )

    def _resized(self, width: int, height: int, where: str) -> tuple[int, int]:
        """Width and height in whole cells, with about the same ratio and a bounded number of pixels."""
        check_ratio(width, height, where)
        cell = self.patch_size * self.merge_size
        return whole_cells(width, height, cell, self.min_pixels, self.max_pixels)


def _class_for(hf_config: Mapping[str, Any]) -> type[ImageProcessor]:
    model_type = hf_config.get("model_type")
    if model_type == "gemma3":
        from quire.renderer.pooled_images import PooledImageProcessor

        return PooledImageProcessor
    if model_type == "gemma4":
        from quire.renderer.scaled_images import ScaledImageProcessor

        return ScaledImageProcessor
    tower = joined_tower(hf_config)
    if tower == PIXTRAL:
        from quire.renderer.lined_images import LinedImageProcessor

        return LinedImageProcessor
    if tower == INTERN:
        from quire.renderer.tiled_images import TiledImageProcessor

        return TiledImageProcessor
    if model_type == "llava_next" and tower is not None:
        from quire.renderer.framed_images import FramedImageProcessor

        return FramedImageProcessor
    if tower is not None:
        from quire.renderer.cropped_images import CroppedImageProcessor

        return CroppedImageProcessor
    return ImageProcessor


@dataclass(frozen=True)
class OpenedMedia:
    """The images and videos of a prompt."""

    processor: ImageProcessor
    images: Sequence[Source]
    videos: Sequence[VideoTokens]

    def set_apart(self, pieces: list[str], tokenizer: Tokenizer) -> list[str]:
        """A text whose marks stand as the model has learned them."""
        videos = self.processor.videos
        if videos is not None and self.videos:
            pieces = videos.text_with_times(pieces, self.videos, tokenizer)
        return self.processor.set_apart(pieces, tokenizer)

    def with_times(self, token_ids: list[int], tokenizer: Tokenizer | None) -> list[int]:
        """The same of the marks of videos among tokens."""
        videos = self.processor.videos
        if videos is None or not self.videos:
            return token_ids
        return videos.tokens_with_times(token_ids, self.videos, tokenizer)

    def expand(self, token_ids: list[int], max_tokens: int | None) -> tuple[list[int], list[Media]]:
        return self.processor.expand(token_ids, self.images, max_tokens, self.videos)


def check_ratio(width: int, height: int, where: str, most: int = _MOST_RATIO) -> None:
    if max(height, width) > most * min(height, width):
        raise RequestError(
            f"{where}: the image is {width} x {height} pixels; its sides may differ by a factor of {most} at most. "
            "Cut it.",
            param=where,
        )


def common_fields(
    given: Mapping[str, Any],
    sizes: ImageSizes,
    max_images: int,
    *,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    resample: int = _BICUBIC,
) -> dict[str, Any]:
    """What all families read alike, but for the numbers where none are given."""
    return {
        "mean": colours_of(given, "image_mean", mean),
        "std": colours_of(given, "image_std", std),
        "resample": filter_of(given, resample),
        "max_images": max_images,
        **vars(sizes),
    }


def ids_of_marks(tokenizer: Tokenizer, marks: Sequence[str], place: str) -> list[int]:
    """Tokens of text that a processor writes `place` those of an image."""
    ids = [tokenizer.id_of(mark) for mark in marks]
    if None in ids:
        raise ModelError(
            f"tokenizer: has no {' or no '.join(marks)}, which stand {place} the tokens of an image. Take the "
            "tokenizer that belongs to the model."
        )
    return [token for token in ids if token is not None]


def colours_of(given: Mapping[str, Any], name: str, default: Sequence[float]) -> tuple[float, ...]:
    """A number for each colour. ValueError: it cannot be one that pixels are divided by."""
    numbers = tuple(float(number) for number in given.get(name) or default)
    if len(numbers) != len(default) or not all(map(math.isfinite, numbers)) or (name == "image_std" and 0 in numbers):
        raise ValueError(f"{name}={str(numbers)[:80]}: must be {len(default)} numbers, and those of image_std not 0.")
    return numbers


def filter_of(given: Mapping[str, Any], default: int = _BICUBIC) -> int:
    """How an image is resized. ValueError: no way that Pillow knows."""
    number = given.get("resample")
    number = default if number is None else int(number)
    if number not in _FILTERS:
        raise ValueError(f"resample={number}: must be from 0 to {len(_FILTERS) - 1}, a filter of Pillow.")
    return number


def check_steps(given: Mapping[str, Any], steps: Sequence[str] = ("do_resize", "do_rescale")) -> None:
    """ValueError: a step is left out that images cannot do without here."""
    for name in steps:
        if not given.get(name, True):
            raise ValueError(f"{name}=false: must be true.")
    factor = given.get("rescale_factor")
    if factor is not None and not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"rescale_factor={factor}: must be 1/255.")


def param_of(sources: Sequence[tuple[Any, str]]) -> str:
    """What holds all images: the first part of their places."""
    return re.split(r"[.\[]", sources[0][1], maxsplit=1)[0] if sources else "multi_modal_data"


def _check_placeholders(sources: Sequence[tuple[Any, str]], count: int) -> None:
    if count != len(sources):
        param = param_of(sources)
        raise RequestError(
            f"{param}: {len(sources)} images for {count} placeholders in the prompt. Each image needs one, which the "
            "chat template writes for the images of a chat.",
            param=param,
        )


def _check_room(length: int, room: int, where: str, kind: str) -> None:
    if length > room:
        raise RequestError(
            f"{where}: the {kind} becomes {length} tokens, and the model's context has room for {max(0, room)} more. "
            "Make it smaller.",
            param=where,
            code="context_length_exceeded",
        )
