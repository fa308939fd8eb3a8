"""A process that decodes videos of strangers. It may hang, crash or eat memory in the place of others.

Reads from its standard input: what is asked, and the bytes of a video, each behind its length. Answers each with a
letter: "!" and why the video is refused, or "=" and what the header says, or the frames that were asked for. Ends when
its standard input does. PyAV (FFmpeg) decodes. What kind of file it is, is seen here: FFmpeg itself would also take
lists of other files for a video, and open these.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quire.asked_process import LENGTH_BYTES, frames, read_frame
from quire.renderer.decoding_process import REFUSED, base64_decoded, set_limits
from quire.renderer.images import BadImageError

if TYPE_CHECKING:
    from PIL.Image import Image

# width and height as it is shown, frames, and how many of them a second has
HEADER = struct.Struct("=cIIId")
# 4096 x 2304
MOST_PIXELS = 9 << 20
# half an hour of 24 a second
MOST_FRAMES = 43_200
# of all frames up to the last one that is wanted: ten minutes of 1280 x 720
_MOST_DECODED = 1 << 34
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
# the name of AV1's decoder
_DECODERS = {"libdav1d": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9"}
_CONTAINERS = "mp4, mov, webm and mkv"
_USUAL_RATE = 24.0


class BadVideoError(ValueError):
    """Why a video is refused, in words for who sent it."""


class Asked(msgspec.Struct, array_like=True):
    """Without a size: what the header says."""

    is_base64: bool = False
    # in their order, from 0 on
    numbers: list[int] = []
    # width and height of each
    size: tuple[int, int] | None = None
    resample: int = 0


def main() -> None:
    import av
    import PIL.Image

    PIL.Image.init()
    av.logging.set_level(av.logging.PANIC)
    set_limits()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Asked)
    for head in frames(source):
        parts = answer(decoder.decode(head), read_frame(source))
        sink.write(sum(map(len, parts)).to_bytes(LENGTH_BYTES, "big"))
        for part in parts:
            sink.write(part)
        sink.flush()


def answer(asked: Asked, content: bytes) -> list[bytes]:
    try:
        content = base64_decoded(content) if asked.is_base64 else content
        with _in_our_words():
            if asked.size is None:
                return [HEADER.pack(b"=", *_header(content))]
            return [b"=", *_frames(content, asked.numbers, asked.size, asked.resample)]
    except (BadVideoError, BadImageError) as error:
        return [REFUSED + str(error).encode()]


def _header(content: bytes) -> tuple[int, int, int, float]:
    """The first frame says how large it is, and the packets how many there are: a header may say anything."""
    with _opened(content) as (container, stream):
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > MOST_FRAMES:
                raise BadVideoError(f"it has more than {MOST_FRAMES} frames, the most that are read. Cut it.")
    with _opened(content) as (container, stream):
        first = next(_decoded(container, stream), None)
        if first is None:
            raise BadVideoError("it has no frame.")
        rate = float(stream.average_rate or stream.guessed_rate or _USUAL_RATE)
        width, height = _upright(first).size
    return width, height, count, rate if 0.01 <= rate <= 1000 else _USUAL_RATE


def _frames(content: bytes, numbers: list[int], size: tuple[int, int], resample: int) -> Iterator[bytes]:
    """Where a header has promised more than there are, the last one again."""
    from PIL.Image import Resampling

    with _opened(content) as (container, stream):
        decoded = _decoded(container, stream)
        frame: Any = None
        at = -1
        pixels = b""
        for number in numbers:
            while at < number and (following := next(decoded, None)) is not None:
                frame = following
                at += 1
                pixels = b""
            if frame is None:
                raise BadVideoError("it has no frame.")
            if not pixels:
                pixels = _upright(frame).resize(size, resample=Resampling(resample)).tobytes()
            yield pixels


@contextmanager
def _opened(content: bytes) -> Iterator[tuple[Any, Any]]:
    import av

    # nothing that the bytes name is opened
    options = {"protocol_whitelist": "none"}
    with av.open(io.BytesIO(content), mode="r", format=_format_of(content), options=options) as container:
        if not container.streams.video:
            raise BadVideoError("there is no video in it.")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if _DECODERS.get(codec.name, codec.name) not in CODECS:
            raise BadVideoError(f"its codec is {codec.name[:20]}. Allowed are {', '.join(CODECS)}.")
        codec.thread_count = 1
        codec.options = {"max_pixels": str(MOST_PIXELS)}
        _check_size(max(1, codec.width), max(1, codec.height))
        yield container, stream


def _format_of(content: bytes) -> str:
    if content[4:8] == b"ftyp":
        return "mp4"
    if content[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    raise BadVideoError(f"the bytes are no video of a known kind. Allowed are {_CONTAINERS}.")


def _decoded(container: Any, stream: Any) -> Iterator[Any]:
    left = _MOST_DECODED
    for frame in container.decode(stream):
        _check_size(frame.width, frame.height)
        left -= frame.width * frame.height
        if left < 0:
            raise BadVideoError(
                f"it has more than {_MOST_DECODED} pixels in all its frames. Cut it, or make it smaller."
            )
        yield frame


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1 or width * height > MOST_PIXELS:
        raise BadVideoError(f"it is {width} x {height} pixels; from 1 to {MOST_PIXELS} are read. Make it smaller.")


def _upright(frame: Any) -> Image:
    """As it is shown: many phones store a video lying on its side."""
    from PIL import Image

    pixels_HWC = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels_HWC, turns)) if turns else pixels_HWC)


@contextmanager
def _in_our_words() -> Iterator[None]:
    """A decoder fails in any way, and its words may hold addresses of this process."""
    try:
        yield
    except BadVideoError:
        raise
    except MemoryError:
        raise BadVideoError("it takes too much memory to decode. Make it smaller.") from None
    except Exception as error:
        raise BadVideoError(f"it cannot be decoded; it is damaged or incomplete. Allowed are {_CONTAINERS}.") from error
