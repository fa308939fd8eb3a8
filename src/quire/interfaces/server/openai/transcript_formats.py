"""A transcript in the forms that clients ask for: OpenAI's JSON, plain text, and subtitles."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quire.config.speech_tokens import NAMES
from quire.outputs import Segment, Transcript

JSON, VERBOSE_JSON, TEXT, SRT, VTT = "json", "verbose_json", "text", "srt", "vtt"
FORMATS = (JSON, TEXT, SRT, VERBOSE_JSON, VTT)
# whose pieces have times
WITH_TIMES = (VERBOSE_JSON, SRT, VTT)
_NAME_BY_CODE = {code: name for name, code in NAMES.items()}


class Duration(msgspec.Struct):
    """What is paid for elsewhere."""

    seconds: float
    type: str = "duration"


class TranscriptionAnswer(msgspec.Struct):
    """The answer as json."""

    text: str
    usage: Duration


class VerboseTranscription(msgspec.Struct):
    """The answer as verbose_json."""

    task: str
    language: Annotated[str, Meta(description="its name, in English")]
    duration: float
    text: str
    segments: list[Segment]
    usage: Duration


def as_json(transcript: Transcript) -> TranscriptionAnswer:
    return TranscriptionAnswer(transcript.text, Duration(round(transcript.seconds, 2)))


def as_verbose_json(transcript: Transcript, task: str) -> VerboseTranscription:
    seconds = round(transcript.seconds, 2)
    return VerboseTranscription(
        task=task,
        language=_NAME_BY_CODE.get(transcript.language, transcript.language),
        duration=seconds,
        text=transcript.text,
        segments=transcript.segments,
        usage=Duration(seconds),
    )


def as_text(transcript: Transcript, form: str) -> str:
    """As text, srt or vtt."""
    if form == TEXT:
        return f"{transcript.text}\n"
    pieces = [
        f"{_time(piece.start, form)} --> {_time(piece.end, form)}\n{_line(piece)}\n" for piece in transcript.segments
    ]
    if form == SRT:
        return "\n".join(f"{number}\n{piece}" for number, piece in enumerate(pieces, 1))
    return "\n".join(["WEBVTT\n", *pieces])


def _line(piece: Segment) -> str:
    """An arrow would be taken for times, and an empty line for the end."""
    return " ".join(piece.text.replace("-->", "->").split())


def _time(seconds: float, form: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    whole, part = divmod(rest, 1000)
    point = "," if form == SRT else "."
    return f"{minutes // 60:02}:{minutes % 60:02}:{whole:02}{point}{part:03}"
