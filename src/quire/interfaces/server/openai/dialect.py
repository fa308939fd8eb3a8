"""What the other dialects of a chat (OpenAI's Responses, Anthropic's Messages) share: a request is translated into a
ChatRequest, runs as every chat does, and comes back as pieces of one answer. There is no second way to generate.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from quire.errors import ContextLengthError
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.openai.chat import prepare_chat
from quire.interfaces.server.openai.generation import deltas_of
from quire.interfaces.server.openai.logprobs import chat_logprobs
from quire.interfaces.server.openai.reasoning_tokens import total_reasoning_tokens
from quire.interfaces.server.openai.requests import ChatRequest, SharedFields
from quire.interfaces.server.openai.responses import TokenLogprob, Usage
from quire.interfaces.server.openai.work import Counts, Work
from quire.interfaces.server.state import ServerState
from quire.interfaces.server.wire.errors import invalid
from quire.renderer.output_formats import AnswerFormats
from quire.renderer.output_parsing.answer import Content, Piece


class DialectFields(SharedFields, kw_only=True):
    """Fields that both dialects have, all of them with the name and the meaning that they have in a chat."""

    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="vLLM's: values that the chat template can see")
    ] = None

    def as_in_a_chat(self) -> dict[str, Any]:
        """By the names that ChatRequest has for them, which are the same."""
        return {name: getattr(self, name) for name in DialectFields.__struct_fields__ if name != "stream"}


def text_in(part: Mapping[str, Any], name: str, where: str) -> str:
    """A text that must be there, in a part of a request."""
    value = part.get(name)
    if not isinstance(value, str):
        text = "this field is required" if value is None else "must be a text"
        raise invalid(f"{where}.{name}: {text}.", f"{where}.{name}")
    return value


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """What is new in an answer. The last one has a finish_reason."""

    pieces: Sequence[Piece]
    # of all tokens of this step, if they were asked for
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None
    stop_reason: int | str | None


class ChatRun:
    """One chat on its way to one answer."""

    def __init__(self, body: ChatRequest, work: Work, formats: AnswerFormats | None, state: ServerState) -> None:
        self._state = state
        self._work = work
        self._num_top = body.top_logprobs or 0
        self._parser = None if formats is None else formats.open_parser()
        self._token_ids: list[int] = []
        self.counts = Counts()

    @classmethod
    async def prepare(cls, body: ChatRequest, state: ServerState, *, conversation: str = "messages") -> ChatRun:
        """Checked and not started. Raises what a chat raises; `conversation` is the client's word for its messages."""
        work, formats = await prepare_chat(body, state, conversation=conversation)
        return cls(body, work, formats, state)

    @property
    def num_input_tokens(self) -> int:
        return len(self._work.prompts[0])

    @classmethod
    async def count_input(cls, preparing: Awaitable[ChatRun]) -> int:
        """Tokens of the prompt, also of one that is too long for the model. Raises what else is wrong with it, and what
        is refused by its characters, before it becomes tokens."""
        try:
            return (await preparing).num_input_tokens
        except ContextLengthError as error:
            if error.num_prompt_tokens is None:
                raise
            return error.num_prompt_tokens

    @property
    def temperature(self) -> float:
        return self._work.params.temperature

    @property
    def top_p(self) -> float:
        return float(getattr(self._work.params, "top_p", 1.0))

    @property
    def usage(self) -> Usage:
        """Whole when the last step was seen."""
        return self.counts.usage()

    async def _count_thoughts(self) -> None:
        if self._parser is not None:
            work = self._work
            renderer = self._state.engine.renderer
            self.counts.num_reasoning_tokens = await total_reasoning_tokens(
                self._state.count_threads,
                renderer,
                work.prompts[0],
                work.params,
                [(self._token_ids, self._parser.thoughts)],
            )

    def accept(self) -> None:
        """Takes its places in the queue now, or raises 429; `steps` would do the same."""
        self._work.accepted()

    def give_up(self) -> None:
        """It is over, or nothing will come of it: its places are free. May be called again."""
        if self._work.reservation is not None:
            self._work.reservation.close()

    async def steps(self) -> AsyncGenerator[AnswerStep, None]:
        """Closing it aborts the request."""
        state = self._state
        async with aclosing(deltas_of(state.engine, self._work, state.metrics, self.counts)) as deltas:
            async for delta in deltas:
                step = self._step(delta)
                if step.finish_reason is not None:
                    await self._count_thoughts()
                yield step

    def _step(self, delta: OutputDelta) -> AnswerStep:
        is_last = delta.finish_reason is not None
        finish_reason = delta.finish_reason
        if self._parser is None:
            pieces: list[Piece] = [Content(delta.text)] if delta.text else []
        else:
            self._token_ids += delta.token_ids
            pieces = self._parser.push(delta.text, is_last=is_last)
            finish_reason = self._parser.finish_reason(finish_reason)
        return AnswerStep(pieces, self._logprobs(delta), finish_reason, delta.stop_reason)

    def _logprobs(self, delta: OutputDelta) -> Sequence[TokenLogprob]:
        if self._work.params.logprobs is None or not delta.token_ids:
            return ()
        renderer = self._state.engine.renderer
        return chat_logprobs(renderer, list(delta.token_ids), delta.logprobs or [], self._num_top).content
