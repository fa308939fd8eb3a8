"""A chat's answer in OpenAI's form: as events, or folded to one object. What a stream says in all is what a whole
answer says.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from msgspec import UNSET, UnsetType
from msgspec.json import encode as encode_json

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.caller import new_id
from quire.interfaces.server.event_stream import OPENAI
from quire.interfaces.server.openai.chunks import encoder_of, with_token_ids
from quire.interfaces.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs_json
from quire.interfaces.server.openai.requests import ChatRequest, StreamOptions
from quire.interfaces.server.openai.responses import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    TokenLogprob,
    ToolCall,
)
from quire.interfaces.server.openai.work import Work, pieces_of
from quire.interfaces.server.wire.json_answer import JsonArray
from quire.outputs import PromptLogprobs
from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Piece, Reasoning


@dataclass(slots=True)
class _Choice:
    """One answer so far."""

    content: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    # the call, and the parts of its arguments
    calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)
    logprobs: JsonArray = field(default_factory=JsonArray)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.thoughts.append(text)
            case CallStart():
                self.calls.append((piece, []))
            case CallArguments(_, text):
                self.calls[-1][1].append(text)

    def message(self) -> ChatMessage:
        text = "".join(self.content)
        message = ChatMessage(content=text if text or not (self.calls or self.thoughts) else None)
        if self.thoughts:
            message.reasoning = message.reasoning_content = "".join(self.thoughts)
        if self.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments="".join(arguments)))
                for call, arguments in self.calls
            ]
        return message


class ChatAnswer:
    """One chat on its way to its answers."""

    dialect = OPENAI
    long_field = "choices"

    def __init__(self, body: ChatRequest, work: Work) -> None:
        options = body.stream_options or StreamOptions()
        self._work = work
        # what starts an Answer; it is ended there, too
        self.generating = work.generating
        self._renderer = work.model.renderer
        self._has_logprobs = work.params.logprobs is not None
        self._num_top = work.num_top(body.top_logprobs) or 0
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._has_usage = bool(options.include_usage)
        self._counts_on = self._has_usage and bool(options.continuous_usage_stats)
        self._shows_token_ids = body.return_token_ids
        self._names = TokenNames(self._renderer, bool(body.return_tokens_as_token_ids))
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._model = body.model or work.model.name
        self._events = encoder_of(is_padded=bool(options.include_obfuscation))(
            response_id=self._id,
            object_name="chat.completion.chunk",
            created=self._created,
            model=self._model,
            has_usage=self._has_usage and not self._counts_on,
        )
        self._echo = work.echo
        self._is_first = True
        # What stands around the text of an answer that has begun, where nothing else can be in an event.
        self._frames: dict[int, tuple[bytes, bytes] | None] = {}
        self._choices: dict[int, _Choice] = defaultdict(_Choice)
        # of the prompt, whose first token has none
        self._scores: PromptLogprobs = [None]

    # ------------------------------------------------------------------------------------------ to bytes

    def encode(self, delta: OutputDelta) -> bytes:
        frame = self._frames.get(delta.index)
        if frame is not None and delta.text and delta.finish_reason is None:
            # nearly every token comes this way
            return frame[0] + encode_json(delta.text) + frame[1]
        choices = self._encoded(delta)
        if delta.index not in self._frames:
            is_text_alone = delta.pieces is None and not (
                self._has_logprobs or self._shows_token_ids or self._counts_on
            )
            around = _ADDED % (delta.index, _CONTENT, b"null")
            before, _, after = around.partition(b"%b")
            self._frames[delta.index] = self._events.frame(before, after) if is_text_alone else None
            choices.insert(0, _ROLE % delta.index)
            if self._echo:
                choices.insert(1, _ADDED % (delta.index, _CONTENT % encode_json(self._echo), b"null"))
        return b"".join(self._event(choice) for choice in choices)

    def _event(self, choice: bytes) -> bytes:
        beside = b""
        if self._counts_on:
            counts = self._work.counts
            # the first event brings no token
            counts = replace(counts, num_generated_tokens=0) if self._is_first else counts
            beside = b',"usage":' + encode_json(counts.usage())
        if self._shows_token_ids and self._is_first:
            beside += b',"prompt_token_ids":' + encode_json(self._work.prompts[0])
        self._is_first = False
        return self._events.event(choice, beside)

    def _encoded(self, delta: OutputDelta) -> list[bytes]:
        """Choices of a difference: what it adds if it adds anything, then its end."""
        index = delta.index
        choices = []
        added = [_encoded(piece) for piece in pieces_of(delta)]
        shown = b"null"
        if self._has_logprobs and delta.token_ids:
            shown = encode_json(ChatLogprobs(self._logprobs(delta)))
        if delta.token_ids and (self._has_logprobs or self._shows_token_ids):
            added = added or [_CONTENT % b'""']
        ends = delta.finish_reason is not None
        for addition in added:
            if ends and self._counts_on and addition is added[-1]:
                # a client that reads the counts takes an event with the same one for an error
                end = (encode_json(delta.finish_reason), encode_json(delta.stop_reason))
                choices.append(_ADDED_LAST % (index, addition, shown, *end))
                ends = False
                break
            choices.append(_ADDED % (index, addition, shown))
            # they are of all tokens of this difference
            shown = b"null"
        if ends:
            choices.append(_END % (index, encode_json(delta.finish_reason), encode_json(delta.stop_reason)))
        if self._shows_token_ids and choices:
            first, *others = choices
            choices = [
                with_token_ids(first, token_ids=delta.token_ids),
                *(with_token_ids(choice, token_ids=[]) for choice in others),
            ]
        return choices

    async def end(self) -> bytes:
        if not self._has_usage:
            return b""
        return self._events.usage_event(await self._work.usage(), self._work.times())

    # ------------------------------------------------------------------------------------------ to one object

    def fold(self, delta: OutputDelta) -> None:
        choice = self._choices[delta.index]
        for piece in pieces_of(delta):
            choice.add(piece)
        if delta.prompt_logprobs is not None:
            self._scores += delta.prompt_logprobs
        if self._has_logprobs:
            choice.logprobs.extend(self._logprobs(delta))
        if self._shows_token_ids:
            choice.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason

    def message(self) -> ChatMessage:
        """The first answer so far."""
        return self._choices[0].message()

    async def whole(self) -> ChatCompletion:
        turns = self._work.model.engine.answer_turns
        prompt_logprobs = await prompt_logprobs_json(self._scores, turns) if self._shows_prompt_logprobs else None
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(index) for index in range(self._work.num_choices)],
            usage=await self._work.usage(),
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=self._if_shown(self._work.prompts[0]),
            kv_transfer_params=self._work.transfer.params(),
            metrics=self._work.times(),
        )

    def _whole_choice(self, index: int) -> ChatChoice:
        choice = self._choices[index]
        logprobs = ChatLogprobs(choice.logprobs.value()) if self._has_logprobs else None
        message = choice.message()
        if self._echo:
            message.content = self._echo + (message.content or "")
        token_ids = self._if_shown(choice.token_ids)
        return ChatChoice(index, message, logprobs, choice.finish_reason, choice.stop_reason, token_ids)

    def _if_shown(self, token_ids: list[int]) -> list[int] | UnsetType | None:
        if self._shows_token_ids is None:
            return UNSET
        return token_ids if self._shows_token_ids else None

    def _logprobs(self, delta: OutputDelta) -> list[TokenLogprob]:
        return chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._num_top)


def _encoded(piece: Piece) -> bytes:
    match piece:
        case Content(text):
            return _CONTENT % encode_json(text)
        case Reasoning(text):
            encoded = encode_json(text)
            return _REASONING % (encoded, encoded)
        case CallStart(index, name, call_id):
            return _CALL % (index, encode_json(call_id), encode_json(name))
        case CallArguments(index, text):
            return _ARGUMENTS % (index, encode_json(text))


_ROLE = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_ADDED = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}'
_ADDED_LAST = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'
_END = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
_CONTENT = b'{"content":%b}'
_REASONING = b'{"reasoning_content":%b,"reasoning":%b}'
_CALL = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}'
_ARGUMENTS = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'
