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
# Of the images of all requests that a server has: as much lies in its own memory and in the engine's.
MOST_OPEN_BYTES = 256 << 20
# a picture of a million pixels with the published models
_LEAST_ENCODER_TOKENS = 1024
_IMAGE = "image"
_NOT_SERVED = ("video", "audio")
# as in a name of the Domain Name System, lower case
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_")


@dataclass(frozen=True)
class ImageConfig:
    """How many, and from where."""

    max_images: int = MOST_IMAGES
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
        max_images=_max_images(options.limit_mm_per_prompt),
        max_num_encoder_tokens=num_tokens,
        hosts=hosts,
        networks=networks,
        fetch_seconds=options.media_fetch_seconds,
        folder=_folder(options.allowed_local_media_path),
    )
    return config, (num_tokens, reason)


def _max_images(limits: Mapping[str, Any] | None) -> int:
    for kind, number in (limits or {}).items():
        if kind not in (_IMAGE, *_NOT_SERVED):
            raise OptionError(
                f'limit_mm_per_prompt: {kind!r} is no kind of media; known is {_IMAGE!r}, as in {{"image": 4}}.'
            )
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= 1024:
            raise OptionError(f"limit_mm_per_prompt: {kind}={number!r}: must be a whole number from 0 to 1024.")
        if kind in _NOT_SERVED and number:
            raise OptionError(
                f"limit_mm_per_prompt: {kind}={number}: only images are served. Set it to 0, or leave it out."
            )
    return int((limits or {}).get(_IMAGE, MOST_IMAGES))


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
