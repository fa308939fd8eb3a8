"""From sounds to what the engine gets: features for the encoder, window by window, and tokens that stand for them.

Called by the renderer. Bytes are decoded in a process of their own, samples that are in memory here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.asked_process import AskedProcess, AskedProcesses, NotStartedError
from quire.config.sound_sizes import HOP_SAMPLES, RATE, SoundSizes
from quire.errors import EngineError, RequestError
from quire.messages import Media
from quire.renderer.log_mel import features_of
from quire.renderer.sound_files import MOST_BYTES, BadSoundError, mixed

Floats = npt.NDArray[np.float32]

_PROGRAM = "quire.renderer.sound_process"
# Half an hour takes a few.
_SECONDS = 60.0
# one for a client whose sound takes long, and one for the others
_MOST_PROCESSES = 2


@dataclass(frozen=True)
class Sound:
    """The features of a sound of any length."""

    features_MF: Floats
    seconds: float
    sizes: SoundSizes

    @property
    def num_columns(self) -> int:
        """Of the sound itself, 10 ms each."""
        return int(min(self.features_MF.shape[1], round(self.seconds * RATE) // HOP_SAMPLES))

    @property
    def is_one_window(self) -> bool:
        return bool(self.features_MF.shape[1] <= self.sizes.num_columns)

    def window(self, first: int = 0) -> Media:
        """From this column on; behind the end there is nothing."""
        part_MF = self.features_MF[:, first : first + self.sizes.num_columns]
        missing = self.sizes.num_columns - part_MF.shape[1]
        if missing:
            part_MF = np.pad(part_MF, ((0, 0), (0, missing)))
        content = part_MF.tobytes()
        return Media(
            start=0,
            length=self.sizes.num_tokens,
            pixels=content,
            shape=list(part_MF.shape),
            mean=[],
            std=[],
            grid=[1, 1, self.sizes.num_tokens],
            merge_size=1,
            content_hash=hashlib.sha256(f"sound {part_MF.shape} ".encode() + content).digest(),
        )


@dataclass(frozen=True, kw_only=True)
class SoundProcessor:
    """That of a model which listens."""

    sizes: SoundSizes
    # what stands for the tokens of a sound: it opens every text
    token_id: int
    processes: AskedProcesses = field(default_factory=lambda: AskedProcesses(_MOST_PROCESSES, _process))

    @classmethod
    def find(cls, folder: Path, hf_config: Mapping[str, Any]) -> SoundProcessor | None:
        """None where the model does not listen."""
        sizes = SoundSizes.read(folder, hf_config)
        return None if sizes is None else cls(sizes=sizes, token_id=int(hf_config.get("decoder_start_token_id", 0)))

    def hear(self, source: Any, where: str) -> Sound:
        """Encoded bytes, samples at 16 kHz, or (samples, samples a second)."""
        if isinstance(source, bytes | bytearray | memoryview):
            return self._decoded(bytes(source), where)
        samples, rate = source if isinstance(source, tuple) and len(source) == 2 else (source, RATE)
        samples = samples.numpy() if hasattr(samples, "numpy") else samples
        if not isinstance(samples, np.ndarray) or samples.ndim not in (1, 2) or not _is_rate(rate):
            raise RequestError(
                f"{where}: must be encoded bytes, an array of samples at {RATE} Hz, or (array, rate); arrays are "
                "[samples] or [samples, channels].",
                param=where,
            )
        if not np.issubdtype(samples.dtype, np.floating):
            raise RequestError(f"{where}: samples are {samples.dtype}; must be numbers from -1 to 1.", param=where)
        try:
            mono = mixed(samples.astype(np.float32), int(rate))
        except BadSoundError as error:
            raise _refused(str(error), where) from error
        features = features_of(mono, self.sizes.num_mels, self.sizes.num_samples)
        return Sound(features, len(mono) / RATE, self.sizes)

    def _decoded(self, content: bytes, where: str) -> Sound:
        from quire.renderer.decoding_process import REFUSED
        from quire.renderer.sound_process import ASKED, SIZE

        if len(content) > MOST_BYTES:
            raise _refused(f"it has {len(content)} bytes, at most {MOST_BYTES} are taken. Make it smaller.", where)
        asked = ASKED.pack(self.sizes.num_mels, self.sizes.num_samples)
        try:
            found = self.processes.ask([asked, content or b"?"], _SECONDS)
        except TimeoutError:
            raise _refused(f"it takes more than {_SECONDS:g} s to decode. Make it shorter.", where) from None
        except (OSError, EOFError):
            raise _refused("it cannot be decoded: it crashes its decoder. Send another.", where) from None
        except NotStartedError as error:
            raise EngineError(f"sounds: the process that decodes them does not start ({error}).") from error
        if found.startswith(REFUSED):
            raise _refused(found[len(REFUSED) :].decode(), where)
        _, num_samples = SIZE.unpack_from(found)
        features = np.frombuffer(found, dtype=np.float32, offset=SIZE.size).reshape(self.sizes.num_mels, -1)
        return Sound(features, num_samples / RATE, self.sizes)

    def begun(self, token_ids: list[int], media: Media) -> list[int]:
        """A text behind the tokens of a window."""
        return [self.token_id] * media.length + token_ids

    def one_window(self, source: Any, where: str) -> Media:
        """What a single prompt may have."""
        sound = self.hear(source, where)
        if not sound.is_one_window:
            raise RequestError(
                f"{where}: it has {sound.seconds:.1f} s, and a prompt takes {self.sizes.seconds:g} s. LLM.transcribe "
                "and /v1/audio/transcriptions cut it.",
                param=where,
            )
        return sound.window()


def _process() -> AskedProcess:
    return AskedProcess(_PROGRAM, lambda: [bytes(8), b"?"], {"OMP_NUM_THREADS": "1"})


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, int | np.integer) and not isinstance(rate, bool)


def _refused(why: str, where: str) -> RequestError:
    return RequestError(f"{where}: the sound is refused: {why}", param=where)
