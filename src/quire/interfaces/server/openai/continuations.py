"""A completion on its way from the engine to its client, whole or in pieces.

Owns the form of the answer. Where its prompts came from, and how the answer is sent, is the endpoints' business.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.json import encode as encode_json

from quire.engine_client import Stream
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.openai.answer_events import AnswerEvents
from quire.interfaces.server.openai.chunks import encoder_of
from quire.interfaces.server.openai.generation import Answer, PromptScores, collect
from quire.interfaces.server.openai.logprobs import CompletionLogprobsBuilder, prompt_logprobs_json
from quire.interfaces.server.openai.requests import CompletionRequest, StreamOptions
from quire.interfaces.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs, new_id
from quire.interfaces.server.openai.running import running
from quire.interfaces.server.openai.work import Counts, Work
from quire.interfaces.server.state import ServerState


class Continuations:
    """One request on its way to its continuations, whole or in pieces."""

    def __init__(self, body: CompletionRequest, work: Work, texts: list[str], state: ServerState) -> None:
        self._engine = state.engine
        self._metrics = state.metrics
        self._model = body.model or state.model_name
        self._work = work
        # what echo puts before each continuation
        self._texts = texts
        self._echo = bool(body.echo)
        self._has_output = body.max_tokens != 0
        self._num_top = body.logprobs
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._stream_options = body.stream_options or StreamOptions()
        self._id = new_id("cmpl")
        self._created = int(time.time())

    def _builder(self) -> CompletionLogprobsBuilder | None:
        """One a choice, because each counts its own characters."""
        if self._num_top is None:
            return None
        skip = self._work.params.skip_special_tokens
        return CompletionLogprobsBuilder(self._engine.renderer, self._num_top, skip_special_tokens=skip)

    async def whole(self) -> Completion:
        answer = await collect(self._engine, self._work, self._metrics)
        if not self._has_output:
            answer.counts.num_generated_tokens = 0
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[await self._choice(answer, number) for number in range(self._work.num_choices)],
            usage=answer.counts.usage(),
        )

    async def _choice(self, answer: Answer, number: int) -> CompletionChoice:
        one = answer.choices[number]
        prompt_number = number // self._work.params.n
        prompt = self._work.prompts[prompt_number]
        scores = answer.prompt_scores.of(prompt_number, len(prompt))
        text = ""
        columns = None
        builder = self._builder()
        if builder:
            columns = CompletionLogprobs()
            if self._echo:
                columns.extend(await builder.build_whole(prompt, scores))
            if self._has_output:
                columns.extend(await builder.build_whole(one.token_ids, one.logprobs))
                # given back one by one: a million objects at once would hold the event loop
                one.logprobs = []
        if self._echo:
            text = self._texts[prompt_number]
        if self._has_output:
            text += one.text
        shown = await prompt_logprobs_json(scores) if self._shows_prompt_logprobs else None
        return CompletionChoice(number, text, columns, one.finish_reason, one.stop_reason, shown)

    @asynccontextmanager
    async def events(self, opening: bytes = b"data: ", closing: bytes = b"\n\n") -> AsyncIterator[Stream[bytes]]:
        """Encoded events, without the closing [DONE]; the request runs for as long as they are open."""
        has_usage = bool(self._stream_options.include_usage)
        encoder = encoder_of(is_padded=bool(self._stream_options.include_obfuscation))(
            response_id=self._id,
            object_name="text_completion",
            created=self._created,
            model=self._model,
            has_usage=has_usage,
            opening=opening,
            closing=closing,
        )
        counts = Counts()
        builders = [self._builder() for _ in range(self._work.num_choices)]
        not_echoed = set(range(self._work.num_choices)) if self._echo else set()
        scores = PromptScores()

        n = self._work.params.n
        is_text_alone = self._has_output and self._num_top is None
        frames = [encoder.frame(*_around_text(number)) for number in range(self._work.num_choices)]

        def encode(delta: OutputDelta) -> bytes:
            prompt_number = delta.prompt_number
            number = prompt_number * n + delta.index
            if is_text_alone and delta.text and delta.finish_reason is None and not not_echoed:
                # nearly every token comes this way
                frame = frames[number]
                if frame is not None:
                    return frame[0] + encode_json(delta.text) + frame[1]
            scores.add(prompt_number, delta)
            builder = builders[number]
            choices = []
            # the prompt's scores are complete when the first token comes
            if number in not_echoed and (delta.token_ids or delta.finish_reason):
                not_echoed.remove(number)
                choices.append(self._echoed(number, prompt_number, scores, builder))
            choices += self._encoded(number, delta, builder)
            return b"".join(map(encoder.event, choices))

        def end() -> bytes:
            if not has_usage:
                return b""
            if not self._has_output:
                counts.num_generated_tokens = 0
            return encoder.usage_event(counts.usage())

        async with running(self._engine, self._work, self._metrics, counts) as deltas:
            yield AnswerEvents(deltas, encode, end)

    def _echoed(
        self, number: int, prompt_number: int, scores: PromptScores, builder: CompletionLogprobsBuilder | None
    ) -> bytes:
        """The choice that repeats the prompt."""
        prompt = self._work.prompts[prompt_number]
        columns = builder.build(prompt, scores.of(prompt_number, len(prompt))) if builder else None
        return _text_choice(number, self._texts[prompt_number], columns)

    def _encoded(self, number: int, delta: OutputDelta, builder: CompletionLogprobsBuilder | None) -> list[bytes]:
        """Choices of a difference: its text if there is any, then its end."""
        choices = []
        if self._has_output:
            columns = builder.build(list(delta.token_ids), delta.logprobs or []) if builder else None
            if delta.text or (columns and columns.tokens):
                choices.append(_text_choice(number, delta.text, columns))
        if delta.finish_reason is not None:
            reasons = encode_json(delta.finish_reason), encode_json(delta.stop_reason)
            choices.append(_END % (number, *reasons))
        return choices


def _around_text(number: int) -> tuple[bytes, bytes]:
    """What stands around the text of a choice that has nothing else."""
    before, _, after = _text_choice(number, "", None).partition(b'""')
    return before, after


def _text_choice(number: int, text: str, columns: CompletionLogprobs | None) -> bytes:
    shown = encode_json(columns) if columns else b"null"
    return _TEXT % (number, encode_json(text), shown)


_TEXT = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
_END = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}'
