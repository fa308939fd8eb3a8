"""Images that were made to hurt a decoder, and odd ones that are images all the same. Made when they are asked for."""

from __future__ import annotations

import base64
import functools
import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from quire.renderer.images import MOST_BYTES, MOST_PIXELS, MOST_WEBP_PIXELS

_SIDE = 4096
# the most that are taken
_LARGE = (_SIDE, MOST_PIXELS // _SIDE)
_LARGE_WEBP = (_SIDE, MOST_WEBP_PIXELS // _SIDE)
_COLOURS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _zeros(num_bytes: int) -> bytes:
    packer = zlib.compressobj(9)
    parts = [packer.compress(bytes(1 << 20)) for _ in range(num_bytes >> 20)]
    return b"".join([*parts, packer.compress(bytes(num_bytes & 0xFFFFF)), packer.flush()])


def png(
    width: int, height: int, depth: int = 8, colour: int = 2, *, before: bytes = b"", idat: bytes | None = None,
    after: bytes = b"", interlaced: int = 0,
) -> bytes:  # fmt: skip
    """Zeros, or other data, under any header."""
    if idat is None:
        idat = _zeros(((width * _COLOURS[colour] * depth + 7) // 8 + 1) * height)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    palette = chunk(b"PLTE", bytes(768)) + chunk(b"tRNS", bytes(256)) if colour == 3 else b""
    return b"\x89PNG\r\n\x1a\n" + head + before + palette + chunk(b"IDAT", idat) + after + chunk(b"IEND", b"")


def _texts(count: int, num_bytes: int, kind: bytes) -> bytes:
    head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
    return chunk(kind, head + _zeros(num_bytes)) * count


def _jpeg_of_size(width: int, height: int) -> bytes:
    """A small one that says that it is large."""
    content = bytearray(encoded(noise(16, 16), "jpeg"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def _flat(mode: str, size: tuple[int, int], kind: str, **options: Any) -> bytes:
    return encoded(Image.new(mode, size), kind, **options)


def _turned(kind: str, size: tuple[int, int]) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", size), kind, exif=exif)


def _frames(kind: str, mode: str, size: tuple[int, int], count: int) -> bytes:
    others = [Image.new(mode, size, number % 200 + 1) for number in range(count - 1)]
    return encoded(Image.new(mode, size), kind, save_all=True, append_images=others)


_GOOD = functools.partial(noise, 50, 50)
# Each is refused in one line.
BOMBS: dict[str, Callable[[], bytes]] = {
    "50k x 50k": lambda: png(50_000, 50_000, idat=b"x"),
    "2^31 x 2^31": lambda: png(1 << 30, 1 << 30, idat=b"x"),
    "0 x 0": lambda: png(0, 0, idat=b"x"),
    "0 x 5": lambda: png(0, 5, idat=b"x"),
    "a row too many": lambda: png(_SIDE, MOST_PIXELS // _SIDE + 1, idat=b"x"),
    "a row too many for webp": lambda: _flat("RGB", (_LARGE_WEBP[0], _LARGE_WEBP[1] + 1), "webp"),
    "a jpeg that says 65k x 65k": lambda: _jpeg_of_size(65_500, 65_500),
    "a gif that says 65k x 65k": lambda: b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + bytes(30),
    "a line": lambda: png(16_000, 2),
    "png without its end": lambda: encoded(_GOOD(), "png")[:600],
    "jpeg without its end": lambda: encoded(_GOOD(), "jpeg")[:400],
    "webp without its end": lambda: encoded(_GOOD(), "webp")[:300],
    "gif without its end": lambda: encoded(_GOOD(), "gif")[:900],
    "a large header and nothing behind it": lambda: png(*_LARGE, idat=zlib.compress(bytes(100))),
    "no pixels": lambda: png(8, 8, idat=b""),
    "pixels that are no zlib": lambda: png(8, 8, idat=bytes(range(200))),
    "a depth that there is not": lambda: png(8, 8, 7, 2, idat=b"x"),
    "a filter that there is not": lambda: png(8, 8, idat=zlib.compress(b"\x09" * 1000)),
    "texts that become 450 MB": lambda: png(8, 8, before=_texts(500, 900_000, b"zTXt")),
    "a text that becomes 500 MB": lambda: png(8, 8, before=_texts(1, 500 << 20, b"zTXt")),
    "international texts that become 450 MB": lambda: png(8, 8, before=_texts(500, 900_000, b"iTXt")),
    "a profile that becomes 500 MB": lambda: png(8, 8, before=_texts(1, 500 << 20, b"iCCP")),
    "texts behind the pixels": lambda: png(8, 8, after=_texts(500, 900_000, b"zTXt")),
    "tiff": lambda: encoded(_GOOD(), "tiff"),
    "tiff of many pages": lambda: _frames("tiff", "L", (8, 8), 50),
    "bmp": lambda: encoded(_GOOD(), "bmp"),
    "ico": lambda: encoded(_GOOD(), "ico"),
    "tga": lambda: encoded(_GOOD(), "tga"),
    "ppm": lambda: encoded(_GOOD(), "ppm"),
    "pcx": lambda: encoded(_GOOD(), "pcx"),
    "jpeg2000": lambda: b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(100),
    "psd": lambda: b"8BPS\x00\x01" + bytes(100),
    "postscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (r) file\n",
    "pdf": lambda: b"%PDF-1.7\n" + bytes(100),
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "film": lambda: b"\x00\x00\x00\x18ftypmp42" + bytes(100),
    "html": lambda: b"<html><script>alert(1)</script></html>",
    "python": lambda: b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
    "nothing": lambda: b"",
    "one byte": lambda: b"\x89",
    "zeros": lambda: bytes(100_000),
    "noise": lambda: random.Random(1).randbytes(100_000),
    "a head alone": lambda: b"\x89PNG\r\n\x1a\n",
    "too many bytes": lambda: encoded(_GOOD(), "png") + bytes(MOST_BYTES),
}  # fmt: skip

# Each is an image, however odd.
ODD: dict[str, Callable[[], bytes]] = {
    "1 x 1": lambda: png(1, 1),
    "the largest with transparency": lambda: png(*_LARGE, 8, 6),
    "the largest jpeg for printers": lambda: _flat("CMYK", _LARGE, "jpeg", progressive=True),
    "the largest webp that moves": lambda: _frames("webp", "RGBA", _LARGE_WEBP, 2),
    "far more pixels than its size": lambda: png(64, 64, idat=_zeros(200 << 20)),
    "a gif of many frames": lambda: _frames("gif", "P", (16, 16), 2000),
    "a png of many frames": lambda: _frames("png", "RGB", (16, 16), 300),
}
# The same, of all other kinds.
LARGE: dict[str, Callable[[], bytes]] = {
    "the largest": lambda: png(*_LARGE),
    "the largest of 16 bits": lambda: png(*_LARGE, 16, 6),
    "the largest grey of 16 bits": lambda: png(*_LARGE, 16, 0),
    "the largest grey with transparency": lambda: png(*_LARGE, 8, 4),
    "the largest of a palette": lambda: png(*_LARGE, 8, 3),
    "the largest of one bit": lambda: png(*_LARGE, 1, 0),
    "the largest in passes": lambda: png(*_LARGE, 8, 0, idat=_zeros(2 * _LARGE[0] * _LARGE[1]), interlaced=1),
    "the largest jpeg": lambda: _flat("RGB", _LARGE, "jpeg", progressive=True),
    "the largest jpeg on its side": lambda: _turned("jpeg", _LARGE),
    "the largest png on its side": lambda: _turned("png", _LARGE),
    "the largest webp": lambda: _flat("RGBA", _LARGE_WEBP, "webp", lossless=True),
    "the largest gif": lambda: _flat("P", _LARGE, "gif"),
}


@functools.cache
def bomb(name: str) -> bytes:
    return (BOMBS | ODD | LARGE)[name]()


def spoilt(seed: int) -> bytes:
    """A good image of any kind in which some bytes are others, or missing."""
    chosen = random.Random(seed)
    kind = chosen.choice(("png", "jpeg", "webp", "gif"))
    image = noise(chosen.randrange(1, 90), chosen.randrange(1, 90), seed % 8)
    content = bytearray(encoded(image.convert(chosen.choice(("RGB", "L", "P"))) if kind == "png" else image, kind))
    for _ in range(chosen.choice((1, 1, 3, 30))):
        place = int(len(content) * chosen.random() ** 3)
        match chosen.randrange(3):
            case 0:
                content[place : place + 1] = bytes([chosen.randrange(256)])
            case 1:
                del content[place : place + chosen.randrange(1, 40)]
            case _:
                content[place:place] = chosen.randbytes(chosen.randrange(1, 40))
    return bytes(content)


def process_of(decoder: Any) -> Any:
    """The one that a decoder has, which was asked for one thing after the other."""
    [process] = decoder.processes._all
    return process.popen
