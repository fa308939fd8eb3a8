"""What windows of a long sound cost, on a model that is not there."""

import asyncio
from types import SimpleNamespace

import numpy as np

from quire.config.sound_sizes import SoundSizes
from quire.interfaces.transcription import Transcription, TranscriptionParams
from quire.renderer.sounds import Sound

FIRST_TIME = 1000
# the pieces from 0 to 0.5 s and from there to 1 s
SAID = [FIRST_TIME, *range(100), FIRST_TIME + 25, FIRST_TIME + 25, *range(100), FIRST_TIME + 50]


class Texts:
    """A renderer that counts."""

    def __init__(self) -> None:
        self.num_decoded = 0
        self.num_prompts = 0
        self.sounds = SimpleNamespace(begun=lambda token_ids, media: token_ids)

    def decode(self, token_ids):
        self.num_decoded += len(token_ids)
        return "".join(chr(97 + token % 26) for token in token_ids)

    def render_prompt(self, text, *, add_special_tokens):
        self.num_prompts += 1
        return SimpleNamespace(token_ids=[1, 2, 3])


def test_a_token_more_does_not_write_down_the_others_again():
    num_windows = 8
    texts = Texts()
    tokens = SimpleNamespace(
        first_timestamp=FIRST_TIME, no_timestamps=FIRST_TIME - 1, languages={"en": 990}, language_id=lambda code: 990,
        previous=991, start=992, end=993, opening=lambda language, task, has_times: [992],
    )  # fmt: skip
    sizes = SoundSizes(num_mels=2, num_tokens=50)
    sound = Sound(np.zeros((2, 100 * num_windows), dtype=np.float32), float(num_windows), sizes)
    params = TranscriptionParams(language="en", prompt="as before")
    transcription = Transcription(texts, tokens, sound, params, 448)

    async def ask(prompt, sampling):
        for token in [1] if sampling.max_tokens == 1 else SAID:
            yield SimpleNamespace(token_ids=[token], cumulative_logprob=0.0, logprobs=None)

    async def main():
        return [part async for part in transcription.parts(ask)]

    parts = asyncio.run(main())
    assert "".join(parts) == transcription.transcript.text
    assert (len(parts), len(transcription.transcript.segments)) == (num_windows, 2 * num_windows)
    # each window once by its pieces, and all of it so far for the text
    assert texts.num_decoded < 3 * num_windows * num_windows * len(SAID)
    assert texts.num_prompts == 1
