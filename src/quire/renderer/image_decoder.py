"""Images as clients give them: data URLs and bytes are decoded in processes of their own, those of Pillow here.

Owns these, of which the first starts with the first image. Turns reasons into errors that name the place of an image.
Blocks; called by ImageProcessor in any thread.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.asked_process import AskedProcess, AskedProcesses, NotStartedError
from quire.errors import EngineError, RequestError
from quire.renderer.decoding_process import GIVEN, REFUSED, SIZE, Asked
from quire.renderer.images import MOST_BYTES, BadImageError, View, check_size, in_our_words, pixels_of, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
# from a width and a height to those that are wanted
Resize = Callable[[int, int], tuple[int, int]]
# the same to what is to be seen
Show = Callable[[int, int], Sequence[View]]

_PROGRAM = "quire.renderer.decoding_process"
# Of the largest image takes one or two, on a busy machine some more.
_SECONDS = 30.0
_DATA = "data:"
# of a data URL: what stands before the comma
_MOST_HEAD = 100


# one for a client whose image takes long, and one for the others
MOST_PROCESSES = 2


def _process() -> AskedProcess:
    return AskedProcess(_PROGRAM, lambda: [msgspec.msgpack.encode(Asked()), b"?"], {"OMP_NUM_THREADS": "1"})


class OpenedImage(Protocol):
    """An image whose header was read; bytes, format and size are within bounds."""

    @property
    def key(self) -> Any:
        """The same for the same content."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, upright as far as its header says; it may turn out to lie on its side."""

    def views(self, show: Show, resample: int) -> list[Pixels]:
        """Of each view [height, width, colours], upright."""

    def pixels(self, resize: Resize, resample: int) -> Pixels:
        """Of one view, of all of it."""


class ImageDecoder:
    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self.processes = AskedProcesses(MOST_PROCESSES, _process)

    def open(self, source: Any, where: str) -> OpenedImage:
        """An image of a data URL, encoded bytes or an image of Pillow."""
        from PIL import Image

        if isinstance(source, str):
            return self._encoded(_content_of(source, where), True, where)
        if isinstance(source, bytes | bytearray):
            return self._encoded(bytes(source), False, where)
        if not isinstance(source, Image.Image):
            raise RequestError(
                f"{where}: must be a data URL, encoded bytes or an image of Pillow, not a {type(source).__name__}.",
                param=where,
            )
        try:
            check_size(source)
            return _Loaded(source, upright_size(source), where)
        except BadImageError as error:
            raise _refused(str(error), where) from error

    def _encoded(self, content: bytes, is_base64: bool, where: str) -> OpenedImage:
        num_bytes = len(content) // 4 * 3 if is_base64 else len(content)
        if num_bytes > MOST_BYTES:
            raise _refused(
                f"the image has {num_bytes} bytes, at most {MOST_BYTES} are allowed. Make it smaller.", where
            )
        width, height = SIZE.unpack(self.ask(Asked(is_base64), content, where))
        return _Encoded(self, content, is_base64, hashlib.sha256(content).digest(), (width, height), where)

    def ask(self, asked: Asked, content: bytes, where: str) -> memoryview:
        """What was asked, as decoding_process writes it."""
        try:
            found = self.processes.ask([msgspec.msgpack.encode(asked), content], self._seconds)
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
        return memoryview(found)[len(GIVEN) :]

    def close(self) -> None:
        """Ends the processes; another image starts another."""
        self.processes.close()


class _Whole(ABC):
    @abstractmethod
    def views(self, show: Show, resample: int) -> list[Pixels]: ...

    def pixels(self, resize: Resize, resample: int) -> Pixels:
        [pixels] = self.views(lambda width, height: [View(resize(width, height))], resample)
        return pixels


@dataclass(frozen=True)
class _Encoded(_Whole):
    decoder: ImageDecoder
    content: bytes
    is_base64: bool
    key: Any
    size: tuple[int, int]
    where: str

    def views(self, show: Show, resample: int) -> list[Pixels]:
        views = list(show(*self.size))
        asked = Asked(self.is_base64, (views, list(show(*reversed(self.size)))), resample)
        found = self.decoder.ask(asked, self.content, self.where)
        pixels = []
        start = 0
        for _ in views:
            width, height = SIZE.unpack_from(found, start)
            start += SIZE.size
            levels = np.frombuffer(found, dtype=np.uint8, count=height * width * 3, offset=start)
            start += levels.nbytes
            pixels.append(levels.reshape(height, width, 3))
        return pixels


@dataclass(frozen=True)
class _Loaded(_Whole):
    """The caller has it in memory already."""

    image: Image
    size: tuple[int, int]
    where: str

    @property
    def key(self) -> Any:
        return id(self.image)

    def views(self, show: Show, resample: int) -> list[Pixels]:
        try:
            with in_our_words():
                return pixels_of(self.image, show(*self.size), show(*reversed(self.size)), resample)
        except BadImageError as error:
            raise _refused(str(error), self.where) from error


def _content_of(url: str, where: str) -> bytes:
    """Of a data URL, as it stands there: in base64."""
    if not url[: len(_DATA)].lower() == _DATA:
        raise _refused("only data URLs are taken here (data:image/png;base64,...). Send the image itself.", where)
    comma = url.find(",", 0, _MOST_HEAD)
    head = url[: max(0, comma)].lower()
    if not head.endswith(";base64") or not head.startswith("data:image/"):
        raise _refused("must begin with data:image/FORMAT;base64, and go on in base64.", where)
    # what is not ASCII is no base64 either
    return url[comma + 1 :].encode("ascii", "replace")


def _refused(why: str, where: str) -> RequestError:
    return RequestError(f"{where}: {why}", param=where)
