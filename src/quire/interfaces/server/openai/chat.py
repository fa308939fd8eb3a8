"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.json import encode as encode_json

from quire.beam_search_params import GenerationParams
from quire.engine_client import Stream
from quire.errors import RequestError
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.caller import current_caller
from quire.interfaces.server.access.in_flight import until_disconnect
from quire.interfaces.server.event_stream import EventStream
from quire.interfaces.server.openai.answer_events import AnswerEvents
from quire.interfaces.server.openai.chat_answers import AnswerStreams, content_delta, message_of
from quire.interfaces.server.openai.chat_tools import ToolChoice, tool_choice_of, with_call_enforced
from quire.interfaces.server.openai.chunks import ChatChunk, encoder_of
from quire.interfaces.server.openai.generation import Answer, Choice, collect
from quire.interfaces.server.openai.known_fields import rules_for
from quire.interfaces.server.openai.logprobs import chat_logprobs, prompt_logprobs_json, whole_chat_logprobs
from quire.interfaces.server.openai.reasoning_tokens import Thoughtful, total_reasoning_tokens
from quire.interfaces.server.openai.rendering import opens_answer, render
from quire.interfaces.server.openai.requests import ChatRequest, StreamOptions
from quire.interfaces.server.openai.responses import ChatChoice, ChatCompletion, ChatLogprobs, new_id
from quire.interfaces.server.openai.running import running
from quire.interfaces.server.openai.sampling import check_length, check_stream_options, generation_params
from quire.interfaces.server.openai.structured_outputs import form_names
from quire.interfaces.server.openai.thinking import NO_EFFORT, template_kwargs_of
from quire.interfaces.server.openai.work import Counts, Work, num_sequences
from quire.interfaces.server.request_body import read_request
from quire.interfaces.server.state import ServerState, state_of
from quire.interfaces.server.whole_answers import WholeAnswers
from quire.interfaces.server.wire.api_description import described
from quire.interfaces.server.wire.errors import invalid, renamed
from quire.interfaces.server.wire.field_rules import REFUSED_BY_BOTH, REFUSED_BY_CHAT
from quire.interfaces.server.wire.json_answer import long_json_answer
from quire.renderer.output_formats import AnswerFormats, OutputFormats
from quire.sampling_params import SamplingParams

router = APIRouter()
RULES = rules_for(ChatRequest, REFUSED_BY_BOTH, REFUSED_BY_CHAT)


@router.post(
    "/v1/chat/completions",
    openapi_extra=described(request=ChatRequest, answer=ChatCompletion, event=ChatChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answers a chat."""
    state = state_of(request)
    body = await read_request(request, ChatRequest, RULES, strict=state.strict)
    chat = await _prepared(body, state)
    if body.stream:
        return EventStream(state.in_flight, chat.events())
    return await long_json_answer(await until_disconnect(state.in_flight, request.receive, chat.whole()), "choices")


async def _prepared(body: ChatRequest, state: ServerState) -> Chat:
    state = await state.of_model(body.model)
    return Chat(body, *await prepare_chat(body, state), state)


WHOLE = WholeAnswers(ChatRequest, RULES, _prepared, "choices")


async def prepare_chat(
    body: ChatRequest, state: ServerState, *, conversation: str = "messages"
) -> tuple[Work, AnswerFormats | None]:
    """A chat, checked and not started, and how to read its answers. Other dialects come this way, too, which may call
    its messages something else."""
    check_stream_options(body)
    params = _params(body, state)
    current_caller().admission.check(num_sequences(params))
    choice = tool_choice_of(body.tools, body.tool_choice)
    if choice.must_call:
        formats = state.engine.renderer.output_formats
        params = with_call_enforced(params, choice, formats, parallel_calls=body.parallel_tool_calls is not False)
    prompt = await render(
        state,
        body.messages,
        tools=choice.tools,
        add_generation_prompt=opens_answer(body),
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=body.add_special_tokens,
        template_kwargs=template_kwargs_of(body.reasoning_effort, body.chat_template_kwargs),
    )
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_length(len(prompt.token_ids), name, _max_tokens(body), state.max_model_len, what=conversation)
    answers = _answer_formats(body, prompt.text or "", choice, params, state)
    if answers is not None and answers.needs_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    work = await Work.prepare(
        state.engine,
        [prompt if prompt.media else prompt.token_ids],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        names={"prompt": conversation, **({"structured_outputs": "tools"} if choice.must_call else form_names(body))},
    )
    return work, answers


def _answer_formats(
    body: ChatRequest, prompt: str, choice: ToolChoice, params: GenerationParams, state: ServerState
) -> AnswerFormats | None:
    """How to read the answers; None: as they are."""
    renderer = state.engine.renderer
    formats = renderer.output_formats
    if isinstance(params, SamplingParams) and params.structured_outputs is not None:
        # a form leaves no room for thoughts, nor for calls unless it is made of them
        formats = OutputFormats(tool=formats.tool if choice.must_call else None)
    return formats.answers(
        prompt,
        tools=choice.tools or (),
        continued=_text_of(body.messages[-1]) if body.continue_final_message else None,
        special_tokens=renderer.special_tokens if params.skip_special_tokens else frozenset(),
        parallel_calls=body.parallel_tool_calls is not False,
        shows_reasoning=body.include_reasoning is not False,
    )


def _text_of(message: dict[str, Any]) -> str:
    """Of a message that was rendered, so its parts are texts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def _max_tokens(body: ChatRequest) -> int | None:
    newer = body.max_completion_tokens
    older = body.max_tokens
    if newer is not None and older is not None and newer != older:
        text = f"max_tokens={older} and max_completion_tokens={newer}: they mean the same. Give one of them."
        raise invalid(text, "max_tokens")
    return older if newer is None else newer


def _params(body: ChatRequest, state: ServerState) -> GenerationParams:
    decided: dict[str, int | None] = {"max_tokens": None}
    asked = _max_tokens(body)
    if asked is not None:
        decided["max_tokens"] = asked
    elif "max_tokens" in state.defaults:
        del decided["max_tokens"]
    if body.logprobs:
        limit = state.engine.config.max_logprobs
        if (body.top_logprobs or 0) > limit:
            raise invalid(f"top_logprobs={body.top_logprobs}: at most {limit} are allowed.", "top_logprobs")
        decided["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs: needs logprobs=true.", "top_logprobs")
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        params = generation_params(body, state.defaults, **decided)
    except RequestError as error:
        raise renamed(error, names) from None
    if body.reasoning_effort == NO_EFFORT and isinstance(params, SamplingParams):
        return _without_thoughts(params, state)
    return params


def _without_thoughts(params: SamplingParams, state: ServerState) -> SamplingParams:
    """Also of a model that thinks whatever its template was told, if its thoughts can be counted."""
    if params.thinking_token_budget is not None or not state.engine.renderer.can_count_thoughts:
        return params
    return msgspec.structs.replace(params, thinking_token_budget=0)


class Chat:
    """One chat on its way to an answer, whole or in pieces."""

    def __init__(self, body: ChatRequest, work: Work, formats: AnswerFormats | None, state: ServerState) -> None:
        self._engine = state.engine
        self._metrics = state.metrics
        self._count_threads = state.count_threads
        self._model = body.model or state.model_name
        self._work = work
        self._formats = formats
        self._num_top = body.top_logprobs or 0
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._stream_options = body.stream_options or StreamOptions()
        self._id = new_id("chatcmpl")
        self._created = int(time.time())

    async def whole(self) -> ChatCompletion:
        answer = await collect(self._engine, self._work, self._metrics)
        choices = await self._choices(answer)
        answers = [(one.token_ids, one.thoughts) for one in answer.choices]
        answer.counts.num_reasoning_tokens = await self._num_reasoning_tokens(answers)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=answer.counts.usage(),
            prompt_logprobs=await self._prompt_logprobs(answer),
        )

    async def _prompt_logprobs(self, answer: Answer) -> list[dict[str, Any] | None] | None:
        if not self._shows_prompt_logprobs:
            return None
        return await prompt_logprobs_json(answer.prompt_scores.of(0, len(self._work.prompts[0])))

    async def _choices(self, answer: Answer) -> list[ChatChoice]:
        choices = []
        for index, one in enumerate(answer.choices):
            message, finish_reason = message_of(one, self._formats)
            logprobs = await self._whole_logprobs(one)
            choices.append(ChatChoice(index, message, logprobs, finish_reason, one.stop_reason))
            # what many answers hold is given back one by one, and others have their turn meanwhile
            one.logprobs = []
            await asyncio.sleep(0)
        return choices

    async def _whole_logprobs(self, one: Choice) -> ChatLogprobs | None:
        if self._work.params.logprobs is None:
            return None
        return await whole_chat_logprobs(self._engine.renderer, one.token_ids, one.logprobs, self._num_top)

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        if self._work.params.logprobs is None:
            return None
        return chat_logprobs(self._engine.renderer, list(delta.token_ids), delta.logprobs or [], self._num_top)

    async def _num_reasoning_tokens(self, answers: Sequence[Thoughtful]) -> int:
        renderer, (prompt, *_) = self._engine.renderer, self._work.prompts
        return await total_reasoning_tokens(self._count_threads, renderer, prompt, self._work.params, answers)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[Stream[bytes]]:
        """Encoded events, without the closing [DONE]; the chat runs for as long as they are open."""
        has_usage = bool(self._stream_options.include_usage)
        encoder = encoder_of(is_padded=bool(self._stream_options.include_obfuscation))(
            response_id=self._id,
            object_name="chat.completion.chunk",
            created=self._created,
            model=self._model,
            has_usage=has_usage,
        )
        counts = Counts()
        streams = AnswerStreams(self._formats)
        has_role: set[int] = set()
        # the tokens of each answer, if their thoughts are to be counted
        tokens: dict[int, list[int]] = {}

        is_text_alone = self._formats is None and self._work.params.logprobs is None
        frames = [encoder.frame(*_around_content(index)) for index in range(self._work.num_choices)]

        def encode(delta: OutputDelta) -> bytes:
            if is_text_alone and delta.text and delta.finish_reason is None and delta.index in has_role:
                # nearly every token comes this way
                frame = frames[delta.index]
                if frame is not None:
                    return frame[0] + encode_json(delta.text) + frame[1]
            if has_usage and self._formats is not None:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
            choices = self._encoded(delta, streams)
            if delta.index not in has_role:
                has_role.add(delta.index)
                choices.insert(0, _ROLE % delta.index)
            return b"".join(map(encoder.event, choices))

        def end() -> bytes | Coroutine[Any, Any, bytes]:
            if not has_usage:
                return b""
            return with_thoughts() if tokens else encoder.usage_event(counts.usage())

        async def with_thoughts() -> bytes:
            answers = [(token_ids, streams.thoughts(index)) for index, token_ids in tokens.items()]
            counts.num_reasoning_tokens = await self._num_reasoning_tokens(answers)
            return encoder.usage_event(counts.usage())

        async with (
            running(self._engine, self._work, self._metrics, counts) as deltas,
            aclosing(AnswerEvents(deltas, encode, end)) as events,
        ):
            yield events

    def _encoded(self, delta: OutputDelta, streams: AnswerStreams) -> list[bytes]:
        """Choices of a difference: what it adds if it adds anything, then its end."""
        index = delta.index
        is_last = delta.finish_reason is not None
        choices = []
        logprobs = self._logprobs(delta) if delta.token_ids else None
        deltas = streams.deltas(index, delta.text, is_last=is_last)
        if logprobs and not deltas:
            deltas = [_NOTHING]
        shown = encode_json(logprobs) if logprobs else b"null"
        for added in deltas:
            choices.append(_ADDED % (index, added, shown))
            # they are of all tokens of this difference
            shown = b"null"
        if delta.finish_reason is not None:
            reason = streams.finish_reason(index, delta.finish_reason)
            reasons = encode_json(reason), encode_json(delta.stop_reason)
            choices.append(_END % (index, *reasons))
        return choices


def _around_content(index: int) -> tuple[bytes, bytes]:
    """What stands around the content of a choice that has nothing else."""
    before, _, after = (_ADDED % (index, content_delta(""), b"null")).partition(b'""')
    return before, after


_ROLE = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_ADDED = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
_NOTHING = b'{"content":""}'
_END = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
