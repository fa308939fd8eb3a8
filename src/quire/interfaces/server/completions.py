"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.beam_search_params import GenerationParams
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.errors import invalid
from quire.interfaces.server.event_stream import EventStream
from quire.interfaces.server.field_rules import REFUSED_BY_BOTH, REFUSED_BY_COMPLETIONS, FieldRules
from quire.interfaces.server.generation import Answer, Counts, PromptScores, Work, collect, deltas_of
from quire.interfaces.server.in_flight import until_disconnect
from quire.interfaces.server.json_answer import json_answer, json_schema_of
from quire.interfaces.server.logprobs import CompletionLogprobsBuilder, prompt_logprobs_json
from quire.interfaces.server.rendering import render
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.requests import CompletionRequest
from quire.interfaces.server.responses import (
    ChunkEncoder,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    new_id,
)
from quire.interfaces.server.sampling import check_length, check_stream_options, generation_params
from quire.interfaces.server.state import ServerState, state_of
from quire.interfaces.server.token_ids import check_token_ids

router = APIRouter()
RULES = FieldRules(CompletionRequest, {**REFUSED_BY_BOTH, **REFUSED_BY_COMPLETIONS})
MAX_PROMPTS = 256
# OpenAI's; a chat has no such default
_DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", openapi_extra=json_schema_of(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continues prompts."""
    state = state_of(request)
    body = await read_request(request, CompletionRequest, RULES, strict=state.strict)
    state.check_model(body.model)
    completion = await _Completion.of(body, state)
    if body.stream:
        return EventStream(state.in_flight, completion.events())
    return json_answer(await until_disconnect(state.in_flight, request.receive, completion.whole()))


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """The four forms of `prompt` as a list of texts or of token lists."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt: must not be an empty list.", "prompt")
    if all(_is_token(part) for part in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed.", "prompt")
    if all(isinstance(part, str) for part in prompt):
        return prompt
    if all(isinstance(part, list) and part and all(_is_token(token) for token in part) for part in prompt):
        return prompt
    raise invalid("prompt: must be a text, a list of texts, a list of token ids or a list of such lists.", "prompt")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _params(body: CompletionRequest, state: ServerState) -> GenerationParams:
    decided: dict[str, Any] = {}
    if body.max_tokens == 0 and not body.echo:
        raise invalid(
            "max_tokens=0: only with echo=true, which returns the prompt alone; else at least 1.", "max_tokens"
        )
    if body.max_tokens is not None:
        # the prompt alone: one token is generated, because the engine does no less, and left out
        decided["max_tokens"] = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
    elif "max_tokens" not in state.defaults:
        decided["max_tokens"] = _DEFAULT_MAX_TOKENS
    if body.logprobs is not None:
        decided["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            decided["prompt_logprobs"] = body.logprobs
    return generation_params(body, state.defaults, **decided)


class _Completion:
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
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._id = new_id("cmpl")
        self._created = int(time.time())

    @classmethod
    async def of(cls, body: CompletionRequest, state: ServerState) -> _Completion:
        check_stream_options(body)
        params = _params(body, state)
        prompts: list[list[int]] = []
        texts: list[str] = []
        for prompt in split_prompts(body.prompt):
            token_ids, text = await _tokens_and_text(state, prompt, body)
            check_length(len(token_ids), "max_tokens", body.max_tokens, state.max_model_len, what="prompt")
            prompts.append(token_ids)
            texts.append(text)
        work = await Work.prepare(
            state.engine, prompts, params, priority=body.priority or 0, cache_salt=body.cache_salt or ""
        )
        return cls(body, work, texts, state)

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
            choices=[self._choice(answer, number) for number in range(self._work.num_choices)],
            usage=answer.counts.usage(),
        )

    def _choice(self, answer: Answer, number: int) -> CompletionChoice:
        one = answer.choices[number]
        prompt_number = number // self._work.params.n
        prompt = self._work.prompts[prompt_number]
        scores = answer.prompt_scores.of(prompt_number, len(prompt))
        text, columns, builder = "", None, self._builder()
        if builder:
            columns = CompletionLogprobs()
            if self._echo:
                columns.extend(builder.build(prompt, scores))
            if self._has_output:
                columns.extend(builder.build(one.token_ids, one.logprobs))
        if self._echo:
            text = self._texts[prompt_number]
        if self._has_output:
            text += one.text
        shown = prompt_logprobs_json(scores) if self._shows_prompt_logprobs else None
        return CompletionChoice(number, text, columns, one.finish_reason, one.stop_reason, shown)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events, without the closing [DONE]."""
        encoder = ChunkEncoder(
            response_id=self._id,
            object_name="text_completion",
            created=self._created,
            model=self._model,
            has_usage=self._has_usage,
        )
        counts = Counts()
        builders = [self._builder() for _ in range(self._work.num_choices)]
        not_echoed = set(range(self._work.num_choices)) if self._echo else set()
        scores = PromptScores()
        async with aclosing(deltas_of(self._engine, self._work, self._metrics, counts)) as deltas:
            async for prompt_number, delta in deltas:
                scores.add(prompt_number, delta)
                number = prompt_number * self._work.params.n + delta.index
                builder = builders[number]
                choices = []
                # the prompt's scores are complete when the first token comes
                if number in not_echoed and (delta.token_ids or delta.finish_reason):
                    not_echoed.remove(number)
                    choices.append(self._echoed(number, prompt_number, scores, builder))
                choices += self._encoded(number, delta, builder)
                if choices:
                    yield b"".join([encoder.event(choice) for choice in choices])
        if self._has_usage:
            if not self._has_output:
                counts.num_generated_tokens = 0
            yield encoder.usage_event(counts.usage())

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
            reasons = msgspec.json.encode(delta.finish_reason), msgspec.json.encode(delta.stop_reason)
            choices.append(_END % (number, *reasons))
        return choices


async def _tokens_and_text(
    state: ServerState, prompt: str | list[int], body: CompletionRequest
) -> tuple[list[int], str]:
    """The prompt as tokens, and as text if it is echoed."""
    renderer = state.engine.renderer
    if isinstance(prompt, str):
        rendered = await render(state, prompt, add_special_tokens=body.add_special_tokens)
        if not rendered.token_ids:
            raise invalid("prompt: holds no tokens. Give at least one character.", "prompt")
        return rendered.token_ids, prompt
    check_token_ids(prompt, state.engine.config.facts.vocab_size, "prompt")
    text = renderer.decode(prompt, skip_special_tokens=body.skip_special_tokens is not False) if body.echo else ""
    return prompt, text


def _text_choice(number: int, text: str, columns: CompletionLogprobs | None) -> bytes:
    shown = msgspec.json.encode(columns) if columns else b"null"
    return _TEXT % (number, msgspec.json.encode(text), shown)


_TEXT = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
_END = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}'
