"""Sounds of strangers: from bytes to samples of one channel, within bounds.

Must never: fetch anything, or show a decoder's own words. Bytes are decoded in sound_process.py alone, as those of
images are. `soundfile` reads what libsndfile knows; without it there is what the standard library reads: plain WAV.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.sound_sizes import RATE
from quire.renderer.resampling import Resampler

Floats = npt.NDArray[np.float32]

MOST_BYTES = 25 << 20
MOST_SECONDS = 1800
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
_RATES = range(1000, 192_001)
_MOST_CHANNELS = 8
_WITHOUT_SOUNDFILE = "Without the package soundfile only WAV is read here: pip install quire[audio]."


class BadSoundError(ValueError):
    """Why a sound is refused, in words for who sent it."""


def samples_of(content: bytes) -> Floats:
    """At RATE, mixed to one channel."""
    with _in_our_words():
        try:
            import soundfile
        except ImportError:
            return _mixed(*_wave_pieces(content))
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in (*FORMATS, "WAVEX", "MPEG"):
                raise BadSoundError(f"its format is {file.format[:20]}. {_allowed()}")
            check_numbers(file.samplerate, file.channels)
            return _mixed(file.samplerate, _pieces_of(file))


def mixed(samples: Floats, rate: int) -> Floats:
    """Samples that are in memory already: [samples], or [samples, channels]."""
    with _in_our_words():
        pieces = samples if samples.ndim == 2 else samples[:, None]
        check_numbers(rate, pieces.shape[1])
        return _mixed(rate, (pieces[first : first + rate] for first in range(0, len(pieces) + 1, rate)))


def check_numbers(rate: int, channels: int) -> None:
    if rate not in _RATES:
        raise BadSoundError(f"it has {rate} samples a second; from {_RATES.start} to {_RATES.stop - 1} are taken.")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise BadSoundError(f"it has {channels} channels; from 1 to {_MOST_CHANNELS} are taken.")


def _mixed(rate: int, pieces: Iterator[Floats]) -> Floats:
    """Pieces of a second, [samples, channels], up to an empty one."""
    resampler = None if rate == RATE else Resampler(rate, RATE)
    # grows in place: a list of pieces would be there twice when they are joined
    made = bytearray()
    num_samples = 0
    for piece_NC in pieces:
        if not len(piece_NC):
            break
        num_samples += len(piece_NC)
        if num_samples > MOST_SECONDS * rate:
            raise BadSoundError(f"it is longer than {MOST_SECONDS} s, the most that is taken. Cut it.")
        piece = piece_NC.mean(axis=1, dtype=np.float32)
        if not np.isfinite(piece).all():
            raise BadSoundError("it has samples that are no finite numbers.")
        made += (piece if resampler is None else resampler.feed(piece)).tobytes()
    if resampler is not None and num_samples:
        made += resampler.finish(num_samples).tobytes()
    if not made:
        raise BadSoundError("it has no samples.")
    return np.frombuffer(made, dtype=np.float32)


def _pieces_of(file: Any) -> Iterator[Floats]:
    while len(piece := file.read(file.samplerate, "float32", always_2d=True)):
        yield piece


def _wave_pieces(content: bytes) -> tuple[int, Iterator[Floats]]:
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise BadSoundError(f"the bytes are no WAV file. {_WITHOUT_SOUNDFILE}")
    try:
        file = wave.Wave_read(io.BytesIO(content))
    except (wave.Error, EOFError):
        raise BadSoundError(f"this kind of WAV is not read. {_WITHOUT_SOUNDFILE}") from None
    width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
    check_numbers(rate, channels)
    if width not in (1, 2, 3, 4):
        raise BadSoundError(f"its samples have {8 * width} bits; 8, 16, 24 or 32 are read.")

    def pieces() -> Iterator[Floats]:
        while data := file.readframes(rate):
            yield _floats(data[: len(data) // (width * channels) * width * channels], width).reshape(-1, channels)

    return rate, pieces()


def _floats(data: bytes, width: int) -> Floats:
    """Whole numbers of 8 (from 0 on) to 32 bits as numbers from -1 to 1."""
    if width == 1:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 3:
        wide = np.zeros((len(data) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        data, width = wide.tobytes(), 4
    scale = 2.0 ** (8 * width - 1)
    samples: Floats = (np.frombuffer(data, f"<i{width}") / scale).astype(np.float32)
    return samples


def _allowed() -> str:
    return f"Allowed are {', '.join(FORMATS).lower()}."


@contextmanager
def _in_our_words() -> Iterator[None]:
    """A decoder fails in any way, and its words may hold addresses of this process."""
    try:
        yield
    except BadSoundError:
        raise
    except MemoryError:
        raise BadSoundError("it takes too much memory to decode. Make it shorter.") from None
    except Exception as error:
        raise BadSoundError(f"it cannot be decoded; it is damaged, or of another format. {_allowed()}") from error
