"""A sound of any length becomes text: window by window, each a request of its own.

A sound that fits into one window is written down at once. Of a longer one, and where times are asked for, the model
says times: a window ends where its last whole piece does, and the next one begins there, as in Transformers. No window
knows the text of the one before. Owns which windows there are and what their tokens mean; whoever calls it runs the
requests.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property

from quire.config.speech_tokens import TRANSCRIBE, TRANSLATE, SpeechTokens
from quire.errors import RequestError
from quire.interfaces.assembly import OutputDelta
from quire.outputs import Segment, Transcript
from quire.renderer import RenderedPrompt, Renderer
from quire.renderer.sounds import Sound
from quire.sampling_params import SamplingParams

# columns of a sound in a step of time
_COLUMNS = 2
_SECONDS_PER_STEP = 0.02
_SECONDS_PER_COLUMN = _SECONDS_PER_STEP / _COLUMNS
# a character of which a part is still to come
_INCOMPLETE = "\ufffd"

Ask = Callable[[RenderedPrompt, SamplingParams], AsyncIterator[OutputDelta]]


@dataclass(frozen=True, kw_only=True)
class TranscriptionParams:
    """What is asked of a sound."""

    # None: it is found out
    language: str | None = None
    task: str = TRANSCRIBE
    # a text that would stand before
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None
    # of pieces
    timestamps: bool = False

    def __post_init__(self) -> None:
        if self.task not in (TRANSCRIBE, TRANSLATE):
            raise RequestError(f"task={self.task!r}: must be {TRANSCRIBE} or {TRANSLATE}.", param="task")


class Transcription:
    """One sound on its way. `parts` is read once; then `transcript` has all."""

    def __init__(
        self, renderer: Renderer, tokens: SpeechTokens, sound: Sound, params: TranscriptionParams, max_model_len: int
    ) -> None:
        self._renderer = renderer
        self._tokens = tokens
        self._sound = sound
        self._params = params
        # tokens of text that the model has room for
        self._room = max_model_len - sound.sizes.num_tokens
        self._has_times = params.timestamps or not sound.is_one_window
        if self._has_times and tokens.first_timestamp is None:
            raise RequestError(
                f"file: this model says no times, which a sound of more than {sound.sizes.seconds:g} s, subtitles and "
                "segments need.",
                param="file",
            )
        self._language = None if params.language is None else tokens.language_id(params.language)
        self._segments: list[Segment] = []
        self._token_ids: list[int] = []

    @property
    def transcript(self) -> Transcript:
        codes = {token: code for code, token in self._tokens.languages.items()}
        language = "en" if self._language is None else codes[self._language]
        return Transcript(
            text=self._decode(self._token_ids).strip(),
            language=language,
            seconds=self._sound.seconds,
            segments=self._segments,
        )

    async def parts(self, ask: Ask) -> AsyncIterator[str]:
        """The text as it becomes known."""
        sent = ""
        first = 0
        while first < self._sound.num_columns or first == 0:
            window = _Window(self, first)
            async for token_ids in window.written(ask):
                if self._has_times:
                    # only whole pieces are known
                    continue
                text = self._decode(token_ids)
                if text.startswith(sent) and not text.endswith(_INCOMPLETE):
                    yield text[len(sent) :]
                    sent = text
            first += max(1, self._settle(window))
            text = self._decode(self._token_ids)
            if text.startswith(sent) and text != sent:
                yield text[len(sent) :]
            sent = text

    def _settle(self, window: _Window) -> int:
        """How many columns are done with."""
        if not self._has_times:
            self._token_ids += window.token_ids
            return self._sound.sizes.num_columns
        assert self._tokens.first_timestamp is not None
        pieces, num_columns = pieces_of(window.token_ids, self._tokens.first_timestamp, window.num_columns)
        offset = window.first * _SECONDS_PER_COLUMN
        for piece in pieces:
            self._token_ids += piece.token_ids
            text = self._decode(piece.token_ids)
            as_bytes = text.encode()
            self._segments.append(
                Segment(
                    id=len(self._segments),
                    seek=window.first,
                    start=round(offset + piece.start * _SECONDS_PER_STEP, 2),
                    end=round(offset + piece.end * _SECONDS_PER_STEP, 2),
                    text=text,
                    tokens=piece.token_ids,
                    temperature=self._params.temperature,
                    avg_logprob=window.logprob / max(1, len(window.token_ids)),
                    compression_ratio=len(as_bytes) / len(zlib.compress(as_bytes)),
                    no_speech_prob=window.no_speech,
                )
            )
        return num_columns

    def _decode(self, token_ids: list[int]) -> str:
        """Times are no text."""
        first = self._tokens.first_timestamp
        return self._renderer.decode([token for token in token_ids if first is None or token < first])

    def opening(self) -> list[int]:
        return self._before + self._tokens.opening(self._language, self._params.task, has_times=self._has_times)

    @cached_property
    def _before(self) -> list[int]:
        """The end of the text that would stand before, the same for each window."""
        if not self._params.prompt.strip():
            return []
        if self._tokens.previous is None:
            raise RequestError("prompt: this model takes no text before. Leave it out.", param="prompt")
        rendered = self._renderer.render_prompt(f" {self._params.prompt.strip()}", add_special_tokens=False)
        # without marks that stand in the text
        text = [token for token in rendered.token_ids if token < self._tokens.end]
        return [self._tokens.previous, *text[-max(1, self._room // 2 - 1) :]]

    def prompt(self, first: int, opening: list[int]) -> RenderedPrompt:
        sounds = self._renderer.sounds
        assert sounds is not None
        media = self._sound.window(first)
        return RenderedPrompt(sounds.begun(opening, media), [media])

    async def listen(self, ask: Ask, first: int) -> float:
        """Finds out the language of a first window; the probability that nobody speaks."""
        languages = list(self._tokens.languages.values())
        is_found = self._language is not None or not languages
        if is_found and not self._has_times:
            return 0.0
        # the mark before that of no times
        no_speech = (self._tokens.no_timestamps or 1) - 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            allowed_token_ids=languages or None,
            logprob_token_ids=[no_speech],
        )
        probability = 0.0
        async for delta in ask(self.prompt(first, [self._tokens.start]), params):
            for token in delta.token_ids:
                if not is_found:
                    self._language = token
            for step in delta.logprobs or ():
                probability = math.exp(step[no_speech].logprob)
        return probability

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self._params.temperature,
            seed=self._params.seed,
            max_tokens=None,
            detokenize=False,
            logprobs=0 if self._has_times else None,
        )

    def columns_from(self, first: int) -> int:
        return min(self._sound.num_columns - first, self._sound.sizes.num_columns)

    @property
    def end_token(self) -> int:
        return self._tokens.end


class _Window:
    """One request, and what it comes to."""

    def __init__(self, whole: Transcription, first: int) -> None:
        self._whole = whole
        self.first = first
        self.num_columns = whole.columns_from(first)
        self.token_ids: list[int] = []
        self.logprob = 0.0
        self.no_speech = 0.0

    async def written(self, ask: Ask) -> AsyncIterator[list[int]]:
        """Its tokens so far, without the one that ends it."""
        whole = self._whole
        self.no_speech = await whole.listen(ask, self.first)
        async for delta in ask(whole.prompt(self.first, whole.opening()), whole.sampling()):
            self.token_ids += [token for token in delta.token_ids if token != whole.end_token]
            self.logprob += delta.cumulative_logprob or 0.0
            yield self.token_ids


@dataclass(frozen=True)
class Piece:
    """Tokens between two times, in steps from the window's beginning."""

    start: int
    end: int
    token_ids: list[int]


def pieces_of(token_ids: list[int], first_timestamp: int, num_columns: int) -> tuple[list[Piece], int]:
    """The pieces of a window, and after how many columns the next one begins.

    Two times side by side end one piece and begin another. What stands behind the last such pair is not whole, unless
    one time ends it: then nothing is said behind it.
    """
    is_time = [token >= first_timestamp for token in token_ids]
    ends = [place + 1 for place in range(len(token_ids) - 1) if is_time[place] and is_time[place + 1]]
    if not ends:
        times = [token - first_timestamp for token in token_ids if token > first_timestamp]
        return [Piece(0, times[-1] if times else num_columns // _COLUMNS, token_ids)], num_columns
    is_over = is_time[-2:] == [False, True]
    if is_over:
        ends.append(len(token_ids))
    pieces = []
    begin = 0
    for end in ends:
        piece = token_ids[begin:end]
        pieces.append(Piece(piece[0] - first_timestamp, piece[-1] - first_timestamp, piece))
        begin = end
    if is_over:
        return pieces, num_columns
    # a window that went nowhere would come again and again
    return pieces, _COLUMNS * pieces[-1].end or num_columns
