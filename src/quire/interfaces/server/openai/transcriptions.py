"""POST /v1/audio/transcriptions and /v1/audio/translations: what is said in a file, as OpenAI's clients send it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from quire.config.speech_tokens import TRANSCRIBE, TRANSLATE
from quire.engine_client import items_of
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.event_stream import OPENAI, EventStream, StreamDialect, event_bytes, folded
from quire.interfaces.server.form import Form
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.requests import CompletionRequest
from quire.interfaces.server.openai.transcript_formats import (
    FORMATS,
    JSON,
    TEXT,
    VERBOSE_JSON,
    WITH_TIMES,
    TranscriptionAnswer,
    as_json,
    as_text,
    as_verbose_json,
)
from quire.interfaces.server.openai.work import Work
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.field_rules import Refused
from quire.interfaces.server.wire.json_answer import json_answer
from quire.interfaces.transcription import Transcription, TranscriptionParams
from quire.outputs import Transcript
from quire.renderer import RenderedPrompt
from quire.renderer.sound_files import MOST_BYTES
from quire.sampling_params import SamplingParams

router = APIRouter()
_SEGMENT, _WORD = "segment", "word"


class TranslationRequest(msgspec.Struct, kw_only=True):
    """The fields of a form beside `file`."""

    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    prompt: Annotated[str | None, Meta(description="a text that would stand before")] = None
    response_format: Annotated[str | None, Meta(description="json (default), text, srt, verbose_json or vtt")] = None
    temperature: Annotated[float | None, Meta(description="0 (default) is greedy")] = None
    seed: Annotated[int | None, Meta(description="vLLM's: same seed and parameters, same text")] = None


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """The same, and what only those have that write down a language in itself."""

    language: Annotated[str | None, Meta(description="a code (en) or a name; by default it is found out")] = None
    timestamp_granularities: Annotated[
        list[str] | None, Meta(description="segment: pieces with times, with verbose_json")
    ] = None
    stream: Annotated[bool | None, Meta(description="server-sent events; with json or text")] = None


REFUSED = {
    "include": Refused("log-probabilities of tokens are not returned", ([],)),
    "chunking_strategy": Refused("windows end where the model says that pieces do", ("auto",)),
    "known_speaker_names": Refused("speakers are not told apart", ([],)),
    "known_speaker_references": Refused("speakers are not told apart", ([],)),
    "to_language": Refused("models translate into English", ("en",)),
}
_OF_TRANSCRIPTIONS = Refused("it belongs to /v1/audio/transcriptions")
TRANSCRIPTION_RULES = rules_for(TranscriptionRequest, REFUSED)
TRANSLATION_RULES = rules_for(
    TranslationRequest,
    {**REFUSED, **dict.fromkeys(("language", "timestamp_granularities", "stream"), _OF_TRANSCRIPTIONS)},
)
_FORM = "the fields file, model, prompt, response_format, temperature, seed"
_MORE = f"{_FORM}, language, timestamp_granularities[], stream"


class TextDone(msgspec.Struct):
    """The last event of a stream; those before are of type transcript.text.delta and have a `delta`."""

    text: str
    type: str = "transcript.text.done"


@router.post(
    "/v1/audio/transcriptions",
    openapi_extra=described(
        answer=TranscriptionAnswer, other_bodies={"multipart/form-data": _MORE}, event=TextDone, errors=(408,)
    ),
)
async def transcribe(request: Request) -> Response:
    """What is said, in its language."""
    return await _answer(request, TranscriptionRequest, TRANSCRIPTION_RULES, TRANSCRIBE)


@router.post(
    "/v1/audio/translations",
    openapi_extra=described(answer=TranscriptionAnswer, other_bodies={"multipart/form-data": _FORM}, errors=(408,)),
)
async def translate(request: Request) -> Response:
    """What is said, in English."""
    return await _answer(request, TranslationRequest, TRANSLATION_RULES, TRANSLATE)


async def _answer(request: Request, request_type: type[Any], rules: Any, task: str) -> Response:
    state = request.app.state
    async with AsyncExitStack() as stack:
        with state.in_flight.enter(is_awaited=False):
            form = await stack.enter_async_context(state.forms.held(request, MOST_BYTES))
        body = _body_of(form, request_type, rules, strict=state.bodies.strict)
        is_stream = bool(getattr(body, "stream", None))
        params = _params(body, task)
        _check_form(body, is_stream=is_stream)
        if not form.file:
            raise invalid("file: this field is required; it holds the sound.", "file")
        model: ServedModel = await state.models.named(body.model)
        with state.in_flight.enter(), in_words_of({"sound": "file"}):
            async with state.sound_room.turn():
                sound = await model.engine.hear(form.file, "file", model.images)
                release = state.sound_room.hold(sound)
            transcription = model.engine.open_transcription(sound, params)
    answer = TranscriptionWork(model, transcription, release)
    if is_stream:
        return EventStream(state.in_flight, answer)
    whole = await until_disconnect(state.in_flight, request.receive, folded(answer))
    if body.response_format in (None, JSON):
        return json_answer(as_json(whole))
    if body.response_format == VERBOSE_JSON:
        return json_answer(as_verbose_json(whole, task))
    return Response(as_text(whole, body.response_format), media_type="text/plain")


def _body_of(form: Form, request_type: type[Any], rules: Any, *, strict: bool) -> Any:
    """The fields of a form are texts; a list is a name that comes several times."""
    fields: dict[str, Any] = {}
    for name, values in form.fields.items():
        plain = name.removesuffix("[]")
        is_list = plain in ("timestamp_granularities", "include") or plain != name
        if len(values) > 1 and not is_list:
            raise invalid(f"{plain}: given twice.", plain)
        fields[plain] = values if is_list else values[0]
    rules.check(fields, strict=strict)
    known = {name: value for name, value in fields.items() if name in request_type.__struct_fields__}
    try:
        return msgspec.convert(known, request_type, strict=False)
    except msgspec.ValidationError as error:
        place = str(error).partition("$.")[2].rstrip("`").partition("[")[0] or None
        shown = str(known.get(place or ""))[:40]
        raise invalid(f"{place}={shown!r}: is not what this field holds (docs/fields.md).", place) from None


def _params(body: TranslationRequest, task: str) -> TranscriptionParams:
    return TranscriptionParams(
        # what is translated may be in any language
        language=getattr(body, "language", None) or None,
        task=task,
        prompt=body.prompt or "",
        temperature=body.temperature or 0.0,
        seed=body.seed,
        timestamps=body.response_format in WITH_TIMES,
    )


def _check_form(body: TranslationRequest, *, is_stream: bool) -> None:
    form = body.response_format
    if form is not None and form not in FORMATS:
        raise invalid(f"response_format={form[:40]!r}: must be one of {', '.join(FORMATS)}.", "response_format")
    for kind in getattr(body, "timestamp_granularities", None) or ():
        name = "timestamp_granularities"
        if kind == _WORD:
            raise invalid(f"{name}: words have no times here; ask for {_SEGMENT}.", name)
        if kind != _SEGMENT:
            raise invalid(f"{name}={kind[:40]!r}: must be {_SEGMENT}.", name)
        if form != VERBOSE_JSON:
            raise invalid(f"{name}: only with response_format={VERBOSE_JSON}.", name)
    if is_stream and form not in (None, JSON, TEXT):
        raise invalid(f"stream: not with response_format={form}, which is whole. Take {JSON} or {TEXT}.", "stream")


class TranscriptionWork:
    """The windows of a sound, each of which has its places in the queue and is counted."""

    long_field = ""

    def __init__(self, model: ServedModel, transcription: Transcription, release: Callable[[], object]) -> None:
        """`release`: of its room, when it has run."""
        self._model = model
        self._transcription = transcription
        self._release = release

    async def _ask(self, prompt: RenderedPrompt, params: SamplingParams) -> AsyncIterator[OutputDelta]:
        # fields that nobody has asked for
        work = await Work.prepare(self._model, [prompt], params, CompletionRequest(prompt=""))
        async with work.generating() as generation:
            async for delta in items_of(generation):
                yield delta

    @property
    def dialect(self) -> StreamDialect:
        return OPENAI

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[TextPieces]:
        try:
            async with aclosing(TextPieces(self._transcription.parts(self._ask))) as pieces:
                yield pieces
        finally:
            self._release()

    def encode(self, piece: str) -> bytes:
        return event_bytes({"type": "transcript.text.delta", "delta": piece}) if piece else b""

    def fold(self, piece: str) -> None:
        """The transcript has it."""

    async def whole(self) -> Transcript:
        return self._transcription.transcript

    async def end(self) -> bytes:
        return event_bytes(msgspec.to_builtins(TextDone(self._transcription.transcript.text)))


class TextPieces:
    """What an iterator brings, as a Stream: read in a task of its own."""

    def __init__(self, pieces: AsyncIterator[str]) -> None:
        self._pieces = pieces
        self._ready: list[str] = []
        self._reader: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._task = asyncio.ensure_future(self._read())
        self._task.add_done_callback(self._ended)

    async def _read(self) -> None:
        async for piece in self._pieces:
            self._ready.append(piece)
            self._reader()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._error = task.exception()
        self._reader()

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader

    @property
    def has_news(self) -> bool:
        return bool(self._ready) or self._error is not None

    @property
    def is_done(self) -> bool:
        return self._task.done() and not self.has_news

    def take(self) -> list[str]:
        ready, self._ready = self._ready, []
        if not ready and self._error is not None:
            error, self._error = self._error, None
            raise error
        return ready

    async def aclose(self) -> None:
        self._reader = lambda: None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
