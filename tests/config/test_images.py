"""What may be said about images at start, and what is refused."""

from typing import Any

import pytest

from quire.config import EngineOptions, resolve
from quire.config.images import ImageConfig, VideoConfig
from quire.errors import OptionError


def of(**options: Any) -> ImageConfig:
    return resolve(EngineOptions(**options))[0].images


def test_what_is_left_open() -> None:
    found = of(max_num_batched_tokens=100)
    assert (found.max_images, found.max_num_encoder_tokens, found.hosts, found.folder) == (8, 1024, (), None)
    assert of(max_num_batched_tokens=8192).max_num_encoder_tokens == 4096


@pytest.mark.parametrize("given", [{"image": 3}, '{"image": 3, "video": 0}'])
def test_a_limit(given: Any) -> None:
    assert of(limit_mm_per_prompt=given).max_images == 3


def test_videos_and_their_frames() -> None:
    assert of().videos == VideoConfig(max_videos=4, num_frames=32, fps=None)
    assert of(limit_mm_per_prompt={"video": 2}).videos.max_videos == 2
    assert of(media_io_kwargs='{"video": {"num_frames": -1, "fps": 2}}').videos == VideoConfig(4, 128, 2.0)
    assert of(media_io_kwargs={"video": {"num_frames": 8, "fps": -1}}).videos == VideoConfig(4, 8, None)


def test_hosts_and_networks() -> None:
    found = of(allowed_media_domains=("Images.Example.com", "10.0.0.0/8", "127.0.0.1", "[::1]"))
    assert found.hosts == ("images.example.com",)
    assert found.networks == ("10.0.0.0/8", "127.0.0.1/32", "::1/128")


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"image": "many"}},
        {"limit_mm_per_prompt": {"image": True}},
        {"limit_mm_per_prompt": {"images": 3}},
        {"limit_mm_per_prompt": {"audio": 1}},
        {"limit_mm_per_prompt": {"video": 1.5}},
        {"media_io_kwargs": {"image": {}}},
        {"media_io_kwargs": {"video": {"num_frames": 129}}},
        {"media_io_kwargs": {"video": {"num_frames": 0}}},
        {"media_io_kwargs": {"video": {"fps": 0}}},
        {"media_io_kwargs": {"video": {"backend": "opencv"}}},
        {"media_io_kwargs": {"video": 3}},
        {"allowed_media_domains": ("https://example.com",)},
        {"allowed_media_domains": ("example.com:80",)},
        {"allowed_media_domains": ("*",)},
        {"allowed_media_domains": ("10.0.0.1/8",)},
        {"allowed_local_media_path": "/no/such/folder"},
    ],
    ids=str,
)
def test_what_is_refused_names_its_option(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        of(**options)
