"""How the sounds of a checkpoint are cut: numbers of config.json, and of preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.json_files import read_object

MODEL_TYPES = ("whisper",)
# samples a second, samples of a spectrum, and from one spectrum to the next
RATE = 16_000
FFT_SAMPLES = 400
HOP_SAMPLES = 160
# spectra that become one token
_STRIDE = 2
_FIXED = {"sampling_rate": RATE, "n_fft": FFT_SAMPLES, "hop_length": HOP_SAMPLES}


@dataclass(frozen=True)
class SoundSizes:
    """A window of sound becomes `num_tokens` tokens; a spectrum has `num_mels` numbers."""

    num_mels: int
    num_tokens: int

    @property
    def num_columns(self) -> int:
        """Spectra of a window."""
        return _STRIDE * self.num_tokens

    @property
    def num_samples(self) -> int:
        return self.num_columns * HOP_SAMPLES

    @property
    def seconds(self) -> float:
        return self.num_samples / RATE

    @classmethod
    def read(cls, folder: Path, hf_config: Mapping[str, Any]) -> SoundSizes | None:
        """Those of a checkpoint; None where the model does not listen."""
        if hf_config.get("model_type") not in MODEL_TYPES:
            return None
        sizes = cls(
            num_mels=_count(hf_config, "num_mel_bins", 80), num_tokens=_count(hf_config, "max_source_positions", 1500)
        )
        file = folder / "preprocessor_config.json"
        if file.is_file():
            given = read_object(file)
            for name, value in {**_FIXED, "feature_size": sizes.num_mels, "n_samples": sizes.num_samples}.items():
                if given.get(name, value) != value:
                    raise ModelError(
                        f"{file}: {name}={str(given[name])[:40]}: must be {value} for this model. Take the file that "
                        "belongs to it."
                    )
        return sizes


def _count(hf_config: Mapping[str, Any], name: str, default: int) -> int:
    value = hf_config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**16:
        raise ModelError(f"config.json: {name}={str(value)[:40]}: must be a whole number from 1 to {2**16}.")
    return value
