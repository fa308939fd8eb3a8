"""Images as clients give them: data URLs and bytes are decoded in a process of their own, those of Pillow here.

Owns that process, which starts with the first image. Turns reasons into errors that name the place of an image. Blocks;
called by ImageProcessor in any thread.
"""

from __future__ import annotations

import binascii
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.asked_process import AskedProcess, NotStartedError
from quire.errors import EngineError, RequestError
from quire.renderer.decoding_process import REFUSED, SIZE, Asked
from quire.renderer.images import MOST_BYTES, BadImageError, check_size, in_our_words, pixels_of

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
# from a width and a height to those that are wanted
Resize = Callable[[int, int], tuple[int, int]]

_PROGRAM = "quire.renderer.decoding_process"
# Of the largest image takes one or two, on a busy machine some more.
_SECONDS = 30.0
_DATA = "data:"
# Of base64, decoded in one go: other threads wait that long at most. A multiple of four.
_PIECE = 1 << 17


class OpenedImage(Protocol):
    """An image whose header was read; bytes, format and size are within bounds."""

    @property
    def key(self) -> Any:
        """The same for the same content."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as it is stored: it may lie on its side."""

    def pixels(self, resize: Resize, resample: int) -> Pixels:
        """[height, width, colours], upright."""


class ImageDecoder:
    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self.process = AskedProcess(_PROGRAM, lambda: [msgspec.msgpack.encode(Asked()), b"?"], {"OMP_NUM_THREADS": "1"})
        # held while the process is asked
        self._lock = threading.Lock()

    def open(self, source: Any, where: str) -> OpenedImage:
        """An image of a data URL, encoded bytes or an image of Pillow."""
        from PIL import Image

        if isinstance(source, str):
            source = _bytes_of(source, where)
        if isinstance(source, bytes | bytearray):
            if len(source) > MOST_BYTES:
                raise _too_many_bytes(len(source), where)
            content = bytes(source)
            width, height, _ = self.ask(Asked(), content, where)
            return _Encoded(self, content, hashlib.sha256(content).digest(), (width, height), where)
        if not isinstance(source, Image.Image):
            raise RequestError(
                f"{where}: must be a data URL, encoded bytes or an image of Pillow, not a {type(source).__name__}.",
                param=where,
            )
        try:
            check_size(source)
        except BadImageError as error:
            raise _refused(str(error), where) from error
        return _Loaded(source, where)

    def ask(self, asked: Asked, content: bytes, where: str) -> tuple[int, int, Pixels]:
        """Width, height and pixels."""
        try:
            with self._lock:
                found = self.process.ask([msgspec.msgpack.encode(asked), content], self._seconds)
        except TimeoutError:
            raise _refused(
                f"the image takes more than {self._seconds:g} s to decode. Make it smaller.", where
            ) from None
        except (OSError, EOFError):
            raise _refused("the image cannot be decoded: it crashes its decoder. Send another.", where) from None
        except NotStartedError as error:
            raise EngineError(f"images: the process that decodes them does not start ({error}).") from error
        if found.startswith(REFUSED):
            raise _refused(found[len(REFUSED) :].decode(), where)
        _, width, height = SIZE.unpack_from(found)
        return width, height, np.frombuffer(found, dtype=np.uint8, offset=SIZE.size)

    def close(self) -> None:
        """Ends the process; another image starts another."""
        self.process.close()


@dataclass(frozen=True)
class _Encoded:
    decoder: ImageDecoder
    content: bytes
    key: Any
    size: tuple[int, int]
    where: str

    def pixels(self, resize: Resize, resample: int) -> Pixels:
        asked = Asked((resize(*self.size), resize(*reversed(self.size))), resample)
        width, height, pixels = self.decoder.ask(asked, self.content, self.where)
        return pixels.reshape(height, width, 3)


@dataclass(frozen=True)
class _Loaded:
    """The caller has it in memory already."""

    image: Image
    where: str

    @property
    def key(self) -> Any:
        return id(self.image)

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size

    def pixels(self, resize: Resize, resample: int) -> Pixels:
        try:
            with in_our_words():
                return pixels_of(self.image, resize(*self.size), resize(*reversed(self.size)), resample)
        except BadImageError as error:
            raise _refused(str(error), self.where) from error


def _bytes_of(url: str, where: str) -> bytes:
    if not url[: len(_DATA)].lower() == _DATA:
        raise _refused("only data URLs are taken here (data:image/png;base64,...). Send the image itself.", where)
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64") or not head.lower().startswith("data:image/"):
        raise _refused("must begin with data:image/FORMAT;base64, and go on in base64.", where)
    if len(content) // 4 * 3 > MOST_BYTES:
        raise _too_many_bytes(len(content) // 4 * 3, where)
    try:
        return _decoded_base64(content)
    except (binascii.Error, ValueError) as error:
        raise _refused("what follows the comma is not valid base64.", where) from error


def _decoded_base64(text: str) -> bytes:
    if text.find("=", 0, len(text) - 2) >= 0:
        raise ValueError("padding before the end")
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)


def _too_many_bytes(count: int, where: str) -> RequestError:
    return _refused(f"the image has {count} bytes, at most {MOST_BYTES} are allowed. Make it smaller.", where)


def _refused(why: str, where: str) -> RequestError:
    return RequestError(f"{where}: {why}", param=where)
