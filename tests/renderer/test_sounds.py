"""Sounds on their way to features: files, rates, channels, bounds."""

import io
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quire.asked_process import AskedProcesses
from quire.config.sound_sizes import SoundSizes
from quire.errors import RequestError
from quire.renderer.decoding_process import REFUSED
from quire.renderer.resampling import Resampler
from quire.renderer.sound_files import BadSoundError, mixed, samples_of
from quire.renderer.sounds import SoundProcessor

SIZES = SoundSizes(num_mels=80, num_tokens=50)


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        numbers = np.round(samples.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8")
        if width == 1:
            numbers += 128
        writer.writeframes(numbers.view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()


@pytest.mark.parametrize(("width", "error"), [(1, 1e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_samples_of_any_width(width: int, error: float):
    np.testing.assert_allclose(samples_of(wav(tone(0.2, 16_000), width=width)), tone(0.2, 16_000), atol=error)


def test_channels_are_mixed():
    both = np.stack([tone(0.1, 16_000), np.zeros(1600, dtype=np.float32)], axis=1)
    np.testing.assert_allclose(samples_of(wav(both.reshape(-1), channels=2)), both.mean(axis=1), atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000, 44_101, 192_000])
def test_other_rates(rate: int):
    made = mixed(tone(1.3, rate), rate)
    assert len(made) == -(-round(1.3 * rate) * 16_000 // rate)
    expected = tone(1.3, 16_000)
    np.testing.assert_allclose(made[200:20_000], expected[200:20_000], atol=2e-3)


def test_what_cannot_be_heard_goes():
    """Above half of the new rate nothing folds back."""
    assert np.abs(mixed(tone(0.5, 48_000, 12_000.0), 48_000)[200:-200]).max() < 2e-3


def test_pieces_do_not_show():
    samples = tone(0.5, 44_100)
    whole = Resampler(44_100, 16_000)
    at_once = np.concatenate([whole.feed(samples), whole.finish(len(samples))])
    cut = Resampler(44_100, 16_000)
    parts = [cut.feed(samples[start : start + 777]) for start in range(0, len(samples), 777)]
    np.testing.assert_array_equal(np.concatenate([*parts, cut.finish(len(samples))]), at_once)


BAD = [
    (b"", "the bytes are no WAV file|it cannot be decoded"),
    (b"RIFF\0\0\0\0WAVEfmt ", "WAV|decoded"),
    (wav(np.zeros(0, dtype=np.float32)), "it has no samples"),
    (wav(tone(0.1, 16_000), rate=500), "500 samples a second"),
    (wav(np.zeros(900, dtype=np.float32), channels=9), "9 channels"),
    (wav(np.zeros(1000 * 1801, dtype=np.float32), rate=1000, width=1), "longer than 1800 s"),
]


@pytest.mark.parametrize(("content", "words"), BAD)
def test_what_is_refused(content: bytes, words: str):
    with pytest.raises(BadSoundError, match=words):
        samples_of(content)


def test_strangers_are_heard_in_a_process_of_its_own():
    processor = SoundProcessor(sizes=SIZES, token_id=1)
    try:
        here = processor.hear((tone(0.5, 16_000), 16_000), "sound")
        there = processor.hear(wav(tone(0.5, 16_000), width=4), "sound")
        assert isinstance(processor.processes, AskedProcesses)
        np.testing.assert_allclose(there.features_MF, here.features_MF, atol=1e-3)
        assert (there.seconds, there.num_columns, there.is_one_window) == (0.5, 50, True)
        for content in (b"x", bytes(26 << 20), wav(np.zeros(0, dtype=np.float32))):
            with pytest.raises(RequestError, match="sound: the sound is refused"):
                processor.hear(content, "sound")
        for odd in ("a name", [0.0], np.zeros(9, dtype=np.int16), (np.zeros(9), "x"), np.full(900, np.nan)):
            with pytest.raises(RequestError):
                processor.hear(odd, "sound")
        long = processor.hear(tone(1.7, 16_000), "sound")
        assert not long.is_one_window
        assert long.window(100).shape == [80, 100]
        with pytest.raises(RequestError, match=r"1\.7 s, and a prompt takes 1 s"):
            processor.one_window(tone(1.7, 16_000), "sound")
    finally:
        processor.processes.close()


def test_a_long_sound_does_not_hold_up_another():
    both = threading.Barrier(2)

    class Meeting:
        def ask(self, question, seconds):
            both.wait(60)
            return bytearray(REFUSED + b"they met")

    processor = SoundProcessor(sizes=SIZES, token_id=1)
    processor.processes._make = Meeting
    with ThreadPoolExecutor(2) as threads:
        for answer in [threads.submit(processor.hear, b"sound", "here") for _ in range(2)]:
            with pytest.raises(RequestError, match="they met"):
                answer.result(60)


@pytest.mark.parametrize("form", ["FLAC", "OGG", "MP3"])
def test_other_files(form: str):
    """Of two channels; MP3 begins some milliseconds late."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    rate = 22_050 if form == "FLAC" else 44_100
    soundfile.write(file, np.stack([tone(1.0, rate)] * 2, axis=1), rate, format=form)
    processor = SoundProcessor(sizes=SIZES, token_id=1)
    try:
        heard = processor.hear(file.getvalue(), "sound")
    finally:
        processor.processes.close()
    assert heard.seconds == pytest.approx(1.0, abs=0.06)
    made = samples_of(file.getvalue())[2000:12_000]
    spectrum = np.abs(np.fft.rfft(made * np.hanning(len(made))))
    assert spectrum.argmax() * 16_000 / len(made) == pytest.approx(440, abs=2)
    assert np.sqrt((made**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.03)
    if form == "FLAC":
        np.testing.assert_allclose(made, tone(1.0, 16_000)[2000:12_000], atol=2e-3)


@pytest.mark.parametrize("head", [b"ID3\x04\x00\x00\x00\x00\x00\x00", b"OggS\x00\x02", b"fLaC\x00\x00\x00\x22"])
def test_without_a_decoder_its_extra_is_named(head: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(BadSoundError, match=r"only WAV is read here: pip install quire\[audio\]"):
        samples_of(head + bytes(1000))
