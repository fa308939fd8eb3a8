"""Videos as clients give them: files are decoded in processes of their own, JPEG frames where images are, and frames
that are in memory here.

Owns these, of which the first starts with the first file. Which frames are taken is decided here. Turns reasons into
errors that name the place of a video. Blocks; called by VideoProcessor in any thread.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.asked_process import AskedProcess, AskedProcesses, NotStartedError
from quire.config.images import MOST_FRAMES, VideoConfig
from quire.errors import EngineError, RequestError
from quire.renderer.decoding_process import REFUSED
from quire.renderer.image_decoder import MOST_PROCESSES, ImageDecoder, OpenedImage
from quire.renderer.images import MOST_BYTES, View, pixels_of
from quire.renderer.video_process import HEADER, MOST_PIXELS, Asked

Pixels = npt.NDArray[np.uint8]

_PROGRAM = "quire.renderer.video_process"
_SECONDS = 30.0
_DATA = "data:"
# of a data URL: what stands before the comma
_MOST_HEAD = 100
_JPEGS = "data:video/jpeg;base64"
# of frames whose times nobody says: those of Transformers, and those of vLLM for JPEG frames
_RATE = 24.0
_JPEG_RATE = 1.0
_FORMS = 'encoded bytes, a data URL, frames ([frames, height, width, 3] or a list of images), or (frames, {"fps": 2.0})'


def _process() -> AskedProcess:
    return AskedProcess(_PROGRAM, lambda: [msgspec.msgpack.encode(Asked()), b"?"], {"OMP_NUM_THREADS": "1"})


@dataclass(frozen=True)
class Timing:
    """Where the frames that are taken stand among those that there are."""

    numbers: list[int]
    num_frames: int
    # of those that there are
    rate: float

    @property
    def sampled_rate(self) -> float:
        return len(self.numbers) / self.num_frames * self.rate


class OpenedVideo(Protocol):
    """One whose header was read; bytes, format and size are within bounds."""

    @property
    def where(self) -> str:
        """Its place in the request."""

    @property
    def timing(self) -> Timing:
        """Of the frames that are taken."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""

    def frames(self, size: tuple[int, int], resample: int) -> Iterator[Pixels]:
        """Those of `timing`, each [height, width, colours]."""


class VideoDecoder:
    def __init__(self, config: VideoConfig, images: ImageDecoder, seconds: float = _SECONDS) -> None:
        self._config = config
        self._images = images
        self._seconds = seconds
        self.processes = AskedProcesses(MOST_PROCESSES, _process)

    def open(self, source: Any, where: str) -> OpenedVideo:
        if isinstance(source, str):
            head, content = _parts_of(source, where)
            if head == _JPEGS:
                return self._jpegs(content, where)
            return self._encoded(content.encode("ascii", "replace"), True, where)
        if isinstance(source, bytes | bytearray):
            return self._encoded(bytes(source), False, where)
        frames, metadata = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
        return _in_memory(frames, metadata, where)

    def _jpegs(self, content: str, where: str) -> OpenedVideo:
        """All frames that there are. How many is counted before the first of them is looked at."""
        count = content.count(",") + 1
        _check_count(count, where)
        if (num_bytes := len(content) // 4 * 3) > MOST_BYTES:
            _refuse(f"it has {num_bytes} bytes, at most {MOST_BYTES} are taken. Make it smaller.", where)
        end = time.monotonic() + self._seconds
        frames: list[OpenedImage] = []
        for number, frame in enumerate(content.split(",")):
            self._check_time(end, where)
            frames.append(self._images.open(f"data:image/jpeg;base64,{frame}", f"{where}, frame {number}"))
            if frames[-1].size != frames[0].size:
                _refuse(
                    f"frame {number} is {frames[-1].size}, and the first is {frames[0].size}; send one size.", where
                )
        rate = self._config.fps or _JPEG_RATE
        return _Jpegs(self, frames, where, Timing(list(range(count)), count, rate), end)

    def _check_time(self, end: float, where: str) -> None:
        if time.monotonic() > end:
            _refuse(f"it takes more than {self._seconds:g} s to decode. Make it shorter.", where)

    def _encoded(self, content: bytes, is_base64: bool, where: str) -> OpenedVideo:
        num_bytes = len(content) // 4 * 3 if is_base64 else len(content)
        if num_bytes > MOST_BYTES:
            _refuse(f"it has {num_bytes} bytes, at most {MOST_BYTES} are taken. Make it smaller.", where)
        if importlib.util.find_spec("av") is None:
            _refuse(
                'files are not read here without the package av (pip install "quire[video]"). Send its frames as '
                "data:video/jpeg;base64,FRAME,FRAME.",
                where,
            )
        _, width, height, count, rate = HEADER.unpack_from(self.ask(Asked(is_base64), content, where))
        return _Encoded(self, content, is_base64, (width, height), where, self._config_timing(count, rate))

    def _config_timing(self, count: int, rate: float) -> Timing:
        """Spread evenly, the first and the last among them."""
        wanted = min(self._config.num_frames, count)
        if self._config.fps is not None:
            wanted = max(1, min(wanted, int(count / rate * self._config.fps)))
        return Timing(np.linspace(0, count - 1, wanted).astype(int).tolist(), count, rate)

    def ask(self, asked: Asked, content: bytes, where: str) -> bytearray:
        try:
            found = self.processes.ask([msgspec.msgpack.encode(asked), content or b"?"], self._seconds)
        except TimeoutError:
            _refuse(f"it takes more than {self._seconds:g} s to decode. Make it shorter or smaller.", where)
        except (OSError, EOFError):
            _refuse("it cannot be decoded: it crashes its decoder. Send another.", where)
        except NotStartedError as error:
            raise EngineError(f"videos: the process that decodes them does not start ({error}).") from error
        if found.startswith(REFUSED):
            _refuse(found[len(REFUSED) :].decode(), where)
        return found

    def close(self) -> None:
        """Ends the processes; another video starts another."""
        self.processes.close()


@dataclass(frozen=True)
class _Encoded:
    decoder: VideoDecoder
    content: bytes
    is_base64: bool
    size: tuple[int, int]
    where: str
    timing: Timing

    def frames(self, size: tuple[int, int], resample: int) -> Iterator[Pixels]:
        asked = Asked(self.is_base64, self.timing.numbers, size, resample)
        found = self.decoder.ask(asked, self.content, self.where)
        width, height = size
        yield from np.frombuffer(found, dtype=np.uint8, offset=1).reshape(-1, height, width, 3)


@dataclass(frozen=True)
class _Jpegs:
    decoder: VideoDecoder
    images: Sequence[OpenedImage]
    where: str
    timing: Timing
    end: float

    @property
    def size(self) -> tuple[int, int]:
        return self.images[0].size

    def frames(self, size: tuple[int, int], resample: int) -> Iterator[Pixels]:
        for image in self.images:
            self.decoder._check_time(self.end, self.where)
            yield image.pixels(lambda width, height: size, resample)


@dataclass(frozen=True)
class _Loaded:
    """The caller has it in memory already."""

    images: Sequence[Any]
    where: str
    timing: Timing

    @property
    def size(self) -> tuple[int, int]:
        size: tuple[int, int] = _as_image(self.images[0], self.where).size
        return size

    def frames(self, size: tuple[int, int], resample: int) -> Iterator[Pixels]:
        for given in self.images:
            image = _as_image(given, self.where)
            view = [View(size)]
            yield pixels_of(image, view, view, resample)[0]


def _in_memory(frames: Any, metadata: Any, where: str) -> OpenedVideo:
    if hasattr(frames, "numpy"):
        frames = frames.numpy()
    if not isinstance(frames, np.ndarray | list | tuple) or not len(frames):
        _refuse(f"must be {_FORMS}.", where)
    _check_count(len(frames), where)
    first = _as_image(frames[0], where)
    if any(_as_image(frame, where).size != first.size for frame in frames):
        _refuse("its frames have several sizes; give all of one size.", where)
    return _Loaded(list(frames), where, _timing_of(metadata, len(frames), where))


def _timing_of(metadata: Any, count: int, where: str) -> Timing:
    """Frames are taken as they come; what is said of them says when they were."""
    if metadata is None:
        return Timing(list(range(count)), count, _RATE)
    if not isinstance(metadata, Mapping):
        _refuse('what stands beside its frames must be an object as {"fps": 2.0}.', where)
    rate = metadata.get("fps") or _RATE
    numbers = metadata.get("frames_indices")
    numbers = list(range(count)) if numbers is None else [int(number) for number in numbers]
    total = metadata.get("total_num_frames") or max(len(numbers), max(numbers, default=0) + 1)
    if len(numbers) != count or numbers != sorted(numbers) or numbers[0] < 0 or total <= numbers[-1]:
        _refuse(
            f"frames_indices must be {count} numbers that grow from 0 on and stay below total_num_frames, one for each "
            "frame.",
            where,
        )
    if not isinstance(rate, int | float) or not 0.01 <= rate <= 1000:
        _refuse(f"fps={str(rate)[:20]}: must be from 0.01 to 1000.", where)
    if metadata.get("do_sample_frames"):
        _refuse(
            "do_sample_frames: frames in memory are taken as they come. Choose them, and say which they are.", where
        )
    return Timing(numbers, int(total), float(rate))


def _as_image(frame: Any, where: str) -> Any:
    from PIL import Image

    if isinstance(frame, Image.Image):
        image = frame
    else:
        frame = frame.numpy() if hasattr(frame, "numpy") else frame
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            _refuse("frames are images of Pillow, or arrays [height, width, 3] of uint8.", where)
        image = Image.fromarray(np.ascontiguousarray(frame))
    width, height = image.size
    if width * height > MOST_PIXELS or width < 1 or height < 1:
        _refuse(f"it is {width} x {height} pixels; from 1 to {MOST_PIXELS} are read. Make it smaller.", where)
    return image


def _check_count(count: int, where: str) -> None:
    if count > MOST_FRAMES:
        _refuse(f"it has {count} frames, at most {MOST_FRAMES} are taken. Send fewer.", where)


def _parts_of(url: str, where: str) -> tuple[str, str]:
    """What a data URL says of itself, and what stands behind its first comma."""
    comma = url.find(",", 0, _MOST_HEAD)
    head = url[: max(0, comma)].lower()
    if not head.startswith(f"{_DATA}video/") or not head.endswith(";base64"):
        _refuse(
            "must begin with data:video/mp4;base64, or another format, and go on in base64; or be frames as "
            "data:video/jpeg;base64,FRAME,FRAME.",
            where,
        )
    return head, url[comma + 1 :]


def _refuse(why: str, where: str) -> NoReturn:
    raise RequestError(f"{where}: the video is refused: {why}", param=where)
