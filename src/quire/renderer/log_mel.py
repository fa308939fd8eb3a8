"""What a speech model hears: the logarithm of spectra on the mel scale, as it was trained with them.

Spectra of 25 ms stand 10 ms apart, each centred at its moment; before its beginning and behind its end a sound goes on
as in a mirror. Sums are of 64-bit numbers, the results of 32 bits.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from quire.config.sound_sizes import FFT_SAMPLES, HOP_SAMPLES, RATE

Floats = npt.NDArray[np.float32]

_MOST_HERTZ = 8000.0
_FLOOR = 1e-10
# what is fainter than the loudest moment by more than so many powers of ten is silence
_RANGE = 8.0
# spectra at a time: some megabytes
_COLUMNS = 2000
# the scale is straight up to here, and a logarithm beyond
_STRAIGHT_HERTZ = 1000.0
_MELS_PER_HERTZ = 3.0 / 200.0
_MELS_PER_LOG = 27.0 / np.log(6.4)


def features_of(samples: Floats, num_mels: int, window_samples: int) -> Floats:
    """[num_mels, columns]. What fits into one window is filled up with silence, as models were trained with it."""
    if len(samples) < window_samples:
        samples = np.concatenate([samples, np.zeros(window_samples - len(samples), dtype=np.float32)])
    return log_mel(samples, num_mels)


def log_mel(samples: Floats, num_mels: int) -> Floats:
    """[num_mels, spectra] of a sound at RATE; longer than a spectrum."""
    half = FFT_SAMPLES // 2
    num_columns = len(samples) // HOP_SAMPLES
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FFT_SAMPLES) / FFT_SAMPLES)
    filters_MB = mel_filters(num_mels)
    found_MF = np.empty((num_mels, num_columns), dtype=np.float32)
    for first in range(0, num_columns, _COLUMNS):
        last = min(first + _COLUMNS, num_columns)
        index = np.arange(first * HOP_SAMPLES - half, (last - 1) * HOP_SAMPLES + half)
        # mirrored at both ends
        index = np.abs(index)
        index = np.where(index < len(samples), index, 2 * (len(samples) - 1) - index)
        moments_FN = np.lib.stride_tricks.sliding_window_view(samples[index], FFT_SAMPLES)[::HOP_SAMPLES]
        power_FB = np.abs(np.fft.rfft(moments_FN * window, axis=1)) ** 2
        found_MF[:, first:last] = np.log10(np.maximum(filters_MB @ power_FB.T, _FLOOR))
    loudest = found_MF.max()
    np.maximum(found_MF, loudest - np.float32(_RANGE), out=found_MF)
    found_MF += np.float32(4.0)
    found_MF /= np.float32(4.0)
    return found_MF


@cache
def mel_filters(num_mels: int) -> npt.NDArray[np.float64]:
    """[num_mels, frequencies]: triangles of equal area that stand at equal distances on the mel scale."""
    hertz_B = np.linspace(0.0, RATE / 2, FFT_SAMPLES // 2 + 1)
    corners = _hertz(np.linspace(0.0, _mels(_MOST_HERTZ), num_mels + 2))
    left, middle, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising = (hertz_B - left) / (middle - left)
    falling = (right - hertz_B) / (right - middle)
    triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (right - left))


def _mels(hertz: float) -> float:
    if hertz < _STRAIGHT_HERTZ:
        return hertz * _MELS_PER_HERTZ
    return float(_STRAIGHT_HERTZ * _MELS_PER_HERTZ + _MELS_PER_LOG * np.log(hertz / _STRAIGHT_HERTZ))


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bend = _STRAIGHT_HERTZ * _MELS_PER_HERTZ
    straight = mels / _MELS_PER_HERTZ
    curved = _STRAIGHT_HERTZ * np.exp((mels - bend) / _MELS_PER_LOG)
    return np.where(mels < bend, straight, curved)
