"""A process that decodes sounds of strangers. It may hang, crash or eat memory in the place of others.

Reads from its standard input: how many numbers a spectrum has and of how many samples a window, and the bytes of a
sound, each behind its length. Answers each with a letter: "!" and why the sound is refused, or "=", the number of its
samples, and the features. Ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import struct
import sys

from quire.asked_process import LENGTH_BYTES, frames, read_frame
from quire.renderer.decoding_process import REFUSED, set_limits
from quire.renderer.log_mel import features_of
from quire.renderer.sound_files import BadSoundError, samples_of

ASKED = struct.Struct("II")
SIZE = struct.Struct("=c3xI")


def main() -> None:
    with contextlib.suppress(ImportError):
        import soundfile  # noqa: F401 (before memory is limited)
    set_limits()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    for head in frames(source):
        # in parts, so that nothing is there twice
        parts = answer(head, read_frame(source))
        sink.write(sum(memoryview(part).nbytes for part in parts).to_bytes(LENGTH_BYTES, "big"))
        for part in parts:
            sink.write(part)
        sink.flush()


def answer(asked: bytes, content: bytes) -> list[memoryview]:
    try:
        samples = samples_of(content)
        num_samples = len(samples)
        features = features_of(samples, *ASKED.unpack(asked))
        return [memoryview(SIZE.pack(b"=", num_samples)), features.data.cast("B")]
    except BadSoundError as error:
        return [memoryview(REFUSED + str(error).encode())]
