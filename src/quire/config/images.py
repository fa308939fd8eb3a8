"""What a user says about images at start."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.engine_options import EngineOptions
from quire.errors import OptionError

MOST_IMAGES = 8
MOST_VIDEOS = 4
# of a video; by default fewer are taken
MOST_FRAMES = 128
# Of the images of all requests that a server has: as much lies in its own memory and in the engine's.
MOST_OPEN_BYTES = 256 << 20
# a picture of a million pixels with the published models
_LEAST_ENCODER_TOKENS = 1024
_IMAGE, _VIDEO = "image", "video"
_NOT_SERVED = ("audio",)
# as in a name of the Domain Name System, lower case
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_")


@dataclass(frozen=True)
class VideoConfig:
    """How many, and which of their frames."""

    max_videos: int = MOST_VIDEOS
    # at most so many of each file, spread evenly
    num_frames: int = 32
    # and not more of each second than so many
    fps: float | None = None


@dataclass(frozen=True)
class ImageConfig:
    """How many, and from where."""

    max_images: int = MOST_IMAGES
    videos: VideoConfig = VideoConfig()
    # tokens of images that one step encodes
    max_num_encoder_tokens: int = 1024
    # that images may be fetched from, and private addresses that may be reached for it; none: nothing is fetched
    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    fetch_seconds: float = 5.0
    # images may be read from below this folder
    folder: str | None = None


def resolve_images(options: EngineOptions) -> tuple[ImageConfig, tuple[object, str]]:
    """Everything about images, and why the encoder has the budget it has."""
    num_tokens = options.max_num_encoder_tokens
    reason = "as asked"
    if num_tokens is None:
        num_tokens = max(_LEAST_ENCODER_TOKENS, options.max_num_batched_tokens // 2)
        reason = f"half of max_num_batched_tokens, at least {_LEAST_ENCODER_TOKENS:,}"
    hosts, networks = _places(options.allowed_media_domains)
    config = ImageConfig(
        max_images=_most(options.limit_mm_per_prompt, _IMAGE, MOST_IMAGES),
        videos=_videos(options),
        max_num_encoder_tokens=num_tokens,
        hosts=hosts,
        networks=networks,
        fetch_seconds=options.media_fetch_seconds,
        folder=_folder(options.allowed_local_media_path),
    )
    return config, (num_tokens, reason)


def _most(limits: Mapping[str, Any] | None, asked: str, default: int) -> int:
    for kind, number in (limits or {}).items():
        if kind not in (_IMAGE, _VIDEO, *_NOT_SERVED):
            raise OptionError(
                f"limit_mm_per_prompt: {kind!r} is no kind of media; known are {_IMAGE!r} and {_VIDEO!r}, as in "
                '{"image": 4}.'
            )
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= 1024:
            raise OptionError(f"limit_mm_per_prompt: {kind}={number!r}: must be a whole number from 0 to 1024.")
        if kind in _NOT_SERVED and number:
            raise OptionError(
                f"limit_mm_per_prompt: {kind}={number}: only images and videos are counted. Set it to 0, or leave it "
                "out."
            )
    return int((limits or {}).get(asked, default))


def _videos(options: EngineOptions) -> VideoConfig:
    given = options.media_io_kwargs or {}
    kwargs = given.get(_VIDEO) or {}
    if not isinstance(kwargs, Mapping) or set(given) - {_VIDEO} or set(kwargs) - {"num_frames", "fps"}:
        raise OptionError(
            f"media_io_kwargs={str(given)[:80]}: known is "
            '{"video": {"num_frames": N, "fps": F}}, at most N frames of a file and F of each second.'
        )
    num_frames = kwargs.get("num_frames", VideoConfig.num_frames)
    if not _is_number(num_frames, int) or (num_frames != -1 and not 1 <= num_frames <= MOST_FRAMES):
        raise OptionError(
            f"media_io_kwargs: num_frames={num_frames!r}: must be a whole number from 1 to {MOST_FRAMES}; -1 means "
            "the most."
        )
    fps = kwargs.get("fps", -1)
    if not _is_number(fps, int | float) or (fps != -1 and not 0.01 <= fps <= 1000):
        raise OptionError(f"media_io_kwargs: fps={fps!r}: must be from 0.01 to 1000; -1 means that it does not count.")
    return VideoConfig(
        max_videos=_most(options.limit_mm_per_prompt, _VIDEO, MOST_VIDEOS),
        num_frames=MOST_FRAMES if num_frames == -1 else num_frames,
        fps=None if fps == -1 else float(fps),
    )


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _places(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of hosts, and addresses or networks such as 10.0.0.0/8."""
    hosts: list[str] = []
    networks: list[str] = []
    for name in names:
        try:
            networks.append(str(ipaddress.ip_network(name.strip("[]"))))
        except ValueError:
            host = name.lower()
            if not _HOST_CHARACTERS.issuperset(host) or not any(letter.isalpha() for letter in host):
                raise OptionError(
                    f"allowed_media_domains={name!r}: must be the name of a host (images.example.com), an address or a "
                    "network (10.0.0.0/8), without scheme, port or path. Names that are not ASCII in their xn-- form."
                ) from None
            hosts.append(host)
    return tuple(hosts), tuple(networks)


def _folder(path: str | None) -> str | None:
    if path is not None and not os.path.isdir(path):
        raise OptionError(f"allowed_local_media_path={path}: must be a folder, from below which images may be read.")
    return path
