"""A process that decodes images of strangers. It may hang, crash or eat memory in the place of others.

Reads from its standard input: what is asked, and the bytes of an image, each behind its length. Answers each with a
letter: "!" and why the image is refused, or "=" and what was asked: the size of the image, or of each view the size and
the pixels. Ends when its standard input does.
"""

from __future__ import annotations

import binascii
import contextlib
import struct
import sys
from pathlib import Path

import msgspec

from quire.asked_process import frames, read_frame, write_frame
from quire.renderer.images import BadImageError, View, open_image, pixels_of, upright_size

# on top of what it has taken when it has imported everything
MEMORY_LIMIT = 320 << 20
REFUSED = b"!"
GIVEN = b"="
SIZE = struct.Struct("=II")


class Asked(msgspec.Struct, array_like=True):
    """Without views: what the header says."""

    is_base64: bool = False
    # for an image of the size that was answered, and for one that turns out to lie on its side
    views: tuple[list[View], list[View]] | None = None
    resample: int = 0


def main() -> None:
    import PIL.ImageOps
    import PIL.PngImagePlugin

    PIL.Image.preinit()
    set_limits()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Asked)
    for head in frames(source):
        write_frame(sink, answer(decoder.decode(head), read_frame(source)))


def answer(asked: Asked, content: bytes) -> bytes:
    try:
        image = open_image(base64_decoded(content) if asked.is_base64 else content)
        if asked.views is None:
            return GIVEN + SIZE.pack(*upright_size(image))
        parts = [GIVEN]
        for pixels in pixels_of(image, *asked.views, asked.resample):
            parts += [SIZE.pack(pixels.shape[1], pixels.shape[0]), pixels.tobytes()]
        return b"".join(parts)
    except BadImageError as error:
        return REFUSED + str(error).encode()


def base64_decoded(text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise BadImageError("what follows the comma is not valid base64.") from None


def set_limits() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits on this system
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
