"""A completion's continuations in OpenAI's form: as events, or folded to one object.

Where its prompts came from, and how the answer is sent, is the endpoints' business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from msgspec.json import encode as encode_json

from quire.interfaces.assembly import OutputDelta
from quire.interfaces.server.access.caller import new_id
from quire.interfaces.server.event_stream import OPENAI
from quire.interfaces.server.openai.chunks import encoder_of, with_token_ids
from quire.interfaces.server.openai.logprobs import CompletionLogprobsBuilder, TokenNames, prompt_logprobs_json
from quire.interfaces.server.openai.requests import CompletionRequest, StreamOptions
from quire.interfaces.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from quire.interfaces.server.openai.work import Work
from quire.interfaces.turnstile import Turnstile
from quire.outputs import Logprob, Logprobs, PromptLogprobs


@dataclass(slots=True)
class _Choice:
    """One continuation so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Echo:
    """A prompt as all its continuations repeat it: made once, for a stream in the parts in which its log-probabilities
    come."""

    def __init__(self, text: str, token_ids: list[int], builder: CompletionLogprobsBuilder | None) -> None:
        self.text = text
        self._token_ids = token_ids
        self._builder = builder
        self._num_tokens = 0
        self._parts: list[bytes] = []
        self._whole: CompletionLogprobs | None = None

    def add(self, positions: Sequence[dict[int, Logprob] | None]) -> None:
        if self._builder is None:
            return
        # the first token of a prompt has none
        scores: PromptLogprobs = [*positions] if self._num_tokens else [None, *positions]
        end = self._num_tokens + len(scores)
        self._parts.append(encode_json(self._builder.build(self._token_ids[self._num_tokens : end], scores)))
        self._num_tokens = end

    def choices(self, number: int) -> list[bytes]:
        """When all has come. The first one has the text."""
        if not self._parts:
            # one token, of which nothing comes
            self.add([None] * (len(self._token_ids) - 1))
        first, *others = self._parts or [b"null"]
        return [_text_choice(number, self.text, first), *(_text_choice(number, "", part) for part in others)]

    async def whole(self, positions: PromptLogprobs, turns: Turnstile) -> CompletionLogprobs | None:
        if self._whole is None and self._builder is not None:
            self._whole = await self._builder.build_whole(self._token_ids, positions, turns)
        return self._whole

    def builder(self) -> CompletionLogprobsBuilder | None:
        """For one that goes on from here."""
        return copy(self._builder)


class Continuations:
    """One request on its way to its continuations."""

    dialect = OPENAI
    long_field = "choices"

    def __init__(
        self,
        body: CompletionRequest,
        work: Work,
        texts: list[str],
        opening: bytes = b"data: ",
        closing: bytes = b"\n\n",
    ) -> None:
        """`texts`: of the prompts, which echo puts before each continuation. `opening`, `closing`: of an event."""
        options = body.stream_options or StreamOptions()
        self._work = work
        self.generating = work.generating
        self._has_output = body.max_tokens != 0
        self._num_top = work.num_top(body.logprobs)
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._has_usage = bool(options.include_usage)
        self._counts_on = self._has_usage and bool(options.continuous_usage_stats)
        self._shows_token_ids = body.return_token_ids
        self._names = TokenNames(work.model.renderer, bool(body.return_tokens_as_token_ids))
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._model = body.model or work.model.name
        self._events = encoder_of(is_padded=bool(options.include_obfuscation))(
            response_id=self._id,
            object_name="text_completion",
            created=self._created,
            model=self._model,
            has_usage=self._has_usage and not self._counts_on,
            opening=opening,
            closing=closing,
        )
        # of the prompts by their numbers, each but the first token's
        self._scores: dict[int, PromptLogprobs] = {}
        # one a choice, because each counts its own characters
        self._builders = [self._builder() for _ in range(work.num_choices)]
        self._choices = [_Choice() for _ in range(work.num_choices)]
        prompts = zip(texts, work.prompts, strict=True) if body.echo else ()
        self._echoes = [_Echo(*prompt, self._builder()) for prompt in prompts]
        self._not_echoed = set(range(work.num_choices)) if body.echo else set()
        self._begun: set[int] = set()
        shows_more = self._num_top is not None or self._shows_token_ids or self._counts_on
        is_text_alone = self._has_output and not shows_more
        # what stands around the text of each choice, where nothing else can be in an event
        self._frames = [self._frame(number) if is_text_alone else None for number in range(work.num_choices)]

    def _builder(self) -> CompletionLogprobsBuilder | None:
        if self._num_top is None:
            return None
        skip = self._work.params.skip_special_tokens
        return CompletionLogprobsBuilder(self._names, self._num_top, skip_special_tokens=skip)

    def _frame(self, number: int) -> tuple[bytes, bytes] | None:
        before, _, after = _text_choice(number, "", b"null").partition(b'""')
        return self._events.frame(before, after)

    # ------------------------------------------------------------------------------------------ to bytes

    def encode(self, delta: OutputDelta) -> bytes:
        number = delta.index
        frame = self._frames[number]
        if frame is not None and delta.text and delta.finish_reason is None and not self._not_echoed:
            # nearly every token comes this way
            return frame[0] + encode_json(delta.text) + frame[1]
        choices: list[bytes] = []
        if self._echoes:
            echo = self._echoes[self._prompt_number(number)]
            if delta.prompt_logprobs is not None:
                echo.add(delta.prompt_logprobs)
            # the prompt's scores are complete when the first token comes
            if number in self._not_echoed and (delta.token_ids or delta.finish_reason):
                self._not_echoed.remove(number)
                choices = echo.choices(number)
                self._builders[number] = echo.builder()
        num_echoed = len(choices)
        choices += self._encoded(number, delta)
        if self._shows_token_ids and choices:
            token_ids = delta.token_ids if self._has_output else []
            choices = self._with_token_ids(number, choices, num_echoed, token_ids)
        beside = b',"usage":' + encode_json(self._work.counts.usage()) if self._counts_on else b""
        return b"".join(self._events.event(choice, beside) for choice in choices)

    def _with_token_ids(self, number: int, choices: list[bytes], num_echoed: int, token_ids: list[int]) -> list[bytes]:
        """Tokens come with the first of the choices behind the echo, and those of the prompt with the very first."""
        each: list[dict[str, list[int]]] = [{"token_ids": []} for _ in choices]
        each[min(num_echoed, len(choices) - 1)]["token_ids"] = token_ids
        if number not in self._begun:
            self._begun.add(number)
            each[0]["prompt_token_ids"] = self._work.prompts[self._prompt_number(number)]
        return [with_token_ids(choice, **ids) for choice, ids in zip(choices, each, strict=True)]

    async def end(self) -> bytes:
        if not self._has_usage:
            return b""
        return self._events.usage_event(await self._usage(), self._work.times())

    def _encoded(self, number: int, delta: OutputDelta) -> list[bytes]:
        """Choices of a difference: its text if there is any, then its end."""
        builder = self._builders[number]
        choices = []
        if self._has_output:
            columns = builder.build(delta.token_ids, delta.logprobs or []) if builder else None
            if delta.text or (columns and columns.tokens) or (self._shows_token_ids and delta.token_ids):
                choices.append(_text_choice(number, delta.text, encode_json(columns)))
        if delta.finish_reason is not None:
            choices.append(_END % (number, encode_json(delta.finish_reason), encode_json(delta.stop_reason)))
        return choices

    # ------------------------------------------------------------------------------------------ to one object

    def fold(self, delta: OutputDelta) -> None:
        choice = self._choices[delta.index]
        self._add_scores(delta)
        if self._has_output:
            choice.texts.append(delta.text)
            if self._num_top is not None or self._shows_token_ids:
                choice.token_ids += delta.token_ids
            if self._num_top is not None:
                choice.logprobs += delta.logprobs or []
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason

    async def whole(self) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[await self._whole_choice(number) for number in range(len(self._choices))],
            usage=await self._usage(),
            kv_transfer_params=self._work.transfer.params(),
            metrics=self._work.times(),
        )

    async def _whole_choice(self, number: int) -> CompletionChoice:
        choice = self._choices[number]
        prompt_number = self._prompt_number(number)
        prompt = self._work.prompts[prompt_number]
        scores = self._scores_of(prompt_number)
        turns = self._work.model.engine.answer_turns
        text = "".join(choice.texts)
        columns = CompletionLogprobs()
        if self._echoes:
            echo = self._echoes[prompt_number]
            text = echo.text + text
            if (echoed := await echo.whole(scores, turns)) is not None:
                columns.extend(echoed)
            self._builders[number] = echo.builder()
        builder = self._builders[number]
        if builder:
            columns.extend(await builder.build_whole(choice.token_ids, choice.logprobs, turns))
            # given back one by one: a million objects at once would hold the event loop
            choice.logprobs = []
        shown = await prompt_logprobs_json(scores, turns) if self._shows_prompt_logprobs else None
        ids = (self._if_shown(choice.token_ids), self._if_shown(prompt))
        shown_columns = columns if builder else None
        return CompletionChoice(number, text, shown_columns, choice.finish_reason, choice.stop_reason, shown, *ids)

    def _if_shown(self, token_ids: list[int]) -> list[int] | None:
        return token_ids if self._shows_token_ids else None

    def _add_scores(self, delta: OutputDelta) -> None:
        if delta.prompt_logprobs is not None:
            self._scores.setdefault(self._prompt_number(delta.index), [None]).extend(delta.prompt_logprobs)

    def _scores_of(self, prompt_number: int) -> PromptLogprobs:
        """One entry a token. A prompt of one token has no scores, so nothing arrives for it."""
        return self._scores.get(prompt_number) or [None] * len(self._work.prompts[prompt_number])

    def _prompt_number(self, number: int) -> int:
        return number // self._work.params.n

    async def _usage(self) -> Usage:
        if not self._has_output:
            self._work.counts.num_generated_tokens = 0
        return await self._work.usage()


def _text_choice(number: int, text: str, columns: bytes) -> bytes:
    return _TEXT % (number, encode_json(text), columns)


_TEXT = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}'
_END = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}'
