"""The tokens with which a model is told what to write down of what it hears, and which it may write, of a checkpoint.

generation_config.json has them; where it is old, config.json or the ids themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.config.model_facts import ModelFacts
from quire.errors import ModelError, RequestError, suggestion

TRANSCRIBE, TRANSLATE = "transcribe", "translate"


@dataclass(frozen=True, kw_only=True)
class SpeechTokens:
    start: int
    end: int
    # by code (en); empty: the model knows one language
    languages: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    # None: the model knows no times
    no_timestamps: int | None = None
    # opens the text before; None: it may have none
    previous: int | None = None
    # greatest first moment, in steps of 20 ms
    max_initial: int | None = None
    # never written, and not written first
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def read(cls, facts: ModelFacts) -> SpeechTokens | None:
        """None for a model that does not listen."""
        if not facts.listens:
            return None
        given = {
            **facts.hf_config,
            **{key: value for key, value in facts.generation_config.items() if value is not None},
        }
        try:
            start = int(given["decoder_start_token_id"])
            ends: Any = given.get("eos_token_id", given.get("bos_token_id"))
            no_timestamps = given.get("no_timestamps_token_id")
            max_initial = given.get("max_initial_timestamp_index")
            languages = {str(name).strip("<|>"): int(token) for name, token in (given.get("lang_to_id") or {}).items()}
            return cls(
                start=start,
                end=int(ends[0] if isinstance(ends, list) else ends),
                languages=languages,
                tasks={str(name): int(token) for name, token in (given.get("task_to_id") or {}).items()},
                no_timestamps=None if no_timestamps is None else int(no_timestamps),
                previous=_previous(given),
                max_initial=None if max_initial is None else int(max_initial),
                suppressed=_ids(given.get("suppress_tokens")),
                suppressed_first=_ids(given.get("begin_suppress_tokens")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ModelError(
                f"{facts.path}: generation_config.json does not say which tokens open and end a transcription "
                f"({type(error).__name__}: {str(error)[:80]}). Take the one that belongs to the model."
            ) from error

    @property
    def first_timestamp(self) -> int | None:
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def says_times(self, prompt_token_ids: Iterable[int]) -> bool:
        """Whether a text behind this prompt has times: where the prompt ends with the task."""
        if self.no_timestamps is None:
            return False
        last = list(prompt_token_ids)[-1:]
        return last == [self.start] if not self.languages else bool(last) and last[0] in self.tasks.values()

    def language_id(self, language: str) -> int | None:
        """None: the model knows this language alone. RequestError for one that it does not know."""
        code = NAMES.get(language.lower(), language.lower())
        if not self.languages:
            if code == "en":
                return None
            raise RequestError(f"language={language[:40]!r}: this model knows English alone.", param="language")
        if code not in self.languages:
            known = ", ".join(list(self.languages)[:100])
            raise RequestError(
                f"language={language[:40]!r}: must be one that the model knows: {known}."
                + suggestion(code, self.languages),
                param="language",
            )
        return self.languages[code]

    def opening(self, language_id: int | None, task: str, *, has_times: bool) -> list[int]:
        """What stands before the text."""
        opening = [self.start]
        if language_id is not None:
            opening.append(language_id)
        if self.tasks:
            opening.append(self.tasks[task])
        elif task != TRANSCRIBE:
            raise RequestError("task: this model writes down and does not translate.", param="model")
        if not has_times and self.no_timestamps is not None:
            opening.append(self.no_timestamps)
        return opening


def _ids(value: Any) -> tuple[int, ...]:
    # -1 stood for a list of the original program, which files spell out today
    return tuple(int(token) for token in value or () if int(token) >= 0)


def _previous(given: dict[str, Any]) -> int | None:
    if given.get("prev_sot_token_id") is not None:
        return int(given["prev_sot_token_id"])
    suppressed = _ids(given.get("suppress_tokens"))
    return suppressed[-2] if len(suppressed) > 1 else None


# What clients write in the place of a code.
NAMES = {
    "english": "en", "chinese": "zh", "german": "de", "spanish": "es", "russian": "ru", "korean": "ko", "french": "fr",
    "japanese": "ja", "portuguese": "pt", "turkish": "tr", "polish": "pl", "catalan": "ca", "dutch": "nl",
    "arabic": "ar", "swedish": "sv", "italian": "it", "indonesian": "id", "hindi": "hi", "finnish": "fi",
    "vietnamese": "vi", "hebrew": "he", "ukrainian": "uk", "greek": "el", "malay": "ms", "czech": "cs",
    "romanian": "ro", "danish": "da", "hungarian": "hu", "tamil": "ta", "norwegian": "no", "thai": "th", "urdu": "ur",
    "croatian": "hr", "bulgarian": "bg", "lithuanian": "lt", "latin": "la", "welsh": "cy", "slovak": "sk",
    "persian": "fa", "latvian": "lv", "bengali": "bn", "serbian": "sr", "slovenian": "sl", "estonian": "et",
    "icelandic": "is", "armenian": "hy", "basque": "eu", "bosnian": "bs", "kazakh": "kk", "albanian": "sq",
    "swahili": "sw", "galician": "gl", "belarusian": "be", "afrikaans": "af", "georgian": "ka",
}  # fmt: skip
