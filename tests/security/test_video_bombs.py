"""Videos that were made to hurt (SEC-10): each is refused in one line, or is a video; memory stays within bounds."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.film import film, is_possible
from tests.support.image_bombs import process_of

from quire.config.images import VideoConfig
from quire.errors import RequestError
from quire.renderer.image_decoder import ImageDecoder
from quire.renderer.images import MOST_BYTES
from quire.renderer.video_process import MOST_FRAMES
from quire.renderer.videos import VideoDecoder

pytestmark = pytest.mark.skipif(not is_possible, reason="needs PyAV")
PLACE = "messages[0].content[0].video_url"
_MOST_MEMORY = 256 << 20
_HEAD = b"\x00\x00\x00\x20ftypisom"


def _with_size(width: int, height: int) -> bytes:
    """A small one whose header says that it is large."""
    content = bytearray(film(3))
    place = content.index(b"avc1", content.index(b"stsd")) + 4 + 24
    content[place : place + 4] = width.to_bytes(2, "big") + height.to_bytes(2, "big")
    return bytes(content)


BOMBS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a head alone": lambda: _HEAD,
    "noise behind a head": lambda: _HEAD + random.Random(1).randbytes(100_000),
    "zeros behind a head": lambda: _HEAD + bytes(1_000_000),
    "noise of matroska": lambda: b"\x1aE\xdf\xa3" + random.Random(1).randbytes(100_000),
    "without its end": lambda: film(40)[:-200],
    "matroska of a few bytes": lambda: film(40, kind="vp9")[:300],
    "a list of other files": lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "a list of files to join": lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a manifest": lambda: b'<?xml version="1.0"?><MPD><BaseURL>file:///etc/</BaseURL></MPD>',
    "a description of a session": lambda: b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=video 5000 RTP/AVP 96\r\n",
    "an image": lambda: b"\x89PNG\r\n\x1a\n" + bytes(100),
    "a sound": lambda: b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(100),
    "too many bytes": lambda: film(3) + bytes(MOST_BYTES),
    "a row too many": lambda: film(2, width=4096, height=2306, kind="mpeg4"),
    "too many frames": lambda: film(MOST_FRAMES + 1, width=16, height=16, kind="mpeg4"),
}
ODD: dict[str, Callable[[], bytes]] = {
    "one frame": lambda: film(1),
    "a large one": lambda: film(8, width=4096, height=2304),
    "many small frames": lambda: film(3000, width=16, height=16, kind="mpeg4"),
    "bytes behind its end": lambda: film(3) + bytes(1000),
    "another size in its header": lambda: _with_size(1000, 2000),
}
_SLOW = ("too many frames", "a large one", "a row too many")


@pytest.fixture(scope="module")
def decoder() -> Iterator[VideoDecoder]:
    images = ImageDecoder()
    decoder = VideoDecoder(VideoConfig(), images)
    decoder.open(film(3), PLACE)
    yield decoder
    decoder.close()
    images.close()


def refusal(decoder: VideoDecoder, content: bytes) -> str | None:
    url = "data:video/mp4;base64," + base64.b64encode(content).decode()
    try:
        for _ in decoder.open(url, PLACE).frames((560, 280), 3):
            pass
    except RequestError as error:
        return str(error)
    return None


def peak_of(decoder: VideoDecoder) -> int:
    """The most memory that the process has had since it was looked at last."""
    process = process_of(decoder)
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in _SLOW else name for name in (*BOMBS, *ODD)]
)
def test_one_alone(name: str, decoder: VideoDecoder) -> None:
    content = (BOMBS | ODD)[name]()
    before = peak_of(decoder)
    text = refusal(decoder, content)
    assert (text is not None) == (name in BOMBS), text
    if text is not None:
        assert text.startswith(PLACE + ": ")
        assert "\n" not in text
        assert "0x" not in text, "an address of a process"
        assert len(text) < 300
    assert peak_of(decoder) - before < _MOST_MEMORY


def test_bytes_that_were_spoilt(decoder: VideoDecoder) -> None:
    """Each is a video, or none; its process outlives them."""
    process = process_of(decoder)
    refusals = []
    for seed in range(120):
        chosen = random.Random(seed)
        content = bytearray(film(12, kind=chosen.choice(("h264", "mpeg4", "vp9", "vp8"))))
        for _ in range(chosen.choice((1, 3, 30))):
            place = int(len(content) * chosen.random())
            content[place : place + 1] = bytes([chosen.randrange(256)])
        refusals.append(refusal(decoder, bytes(content)))
    found = [text for text in refusals if text is not None]
    assert 5 < len(found) < 115
    assert max(map(len, found)) < 300
    assert process_of(decoder) is process
