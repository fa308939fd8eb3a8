"""What one HTTP request asks of the engine: checked, then running, then what it came to.

Owns its places in the queue, and what is counted for `usage`, for quotas and for metrics. An answer's text is taken
apart here (thoughts, calls of tools), so that every dialect is told the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.engine_client import Stream
from quire.errors import ContextLengthError, RequestError
from quire.hooks import HookedRequest
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.hooks.guarded_stream import STOPPED, hooked_request
from quire.interfaces.hooks.judged_calls import JudgedCalls
from quire.interfaces.requests import PreparedRequest
from quire.interfaces.server.access.caller import Caller, Reservation, current_caller
from quire.interfaces.server.access.in_flight import within_time
from quire.interfaces.server.openai.kv_transfer import NoTransfer, transfer_of
from quire.interfaces.server.openai.logprobs import ALL
from quire.interfaces.server.openai.reasoning_tokens import total_reasoning_tokens
from quire.interfaces.server.openai.requests import CompletionRequest, GenerationFields
from quire.interfaces.server.openai.responses import CachedTokens, CompletionTokens, Usage
from quire.interfaces.server.openai.sampling import BEAM_NAMES, form_names
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import internal, renamed
from quire.observability.request_observer import RequestObserver
from quire.observability.tracing import current_trace
from quire.renderer import RenderedPrompt
from quire.renderer.output_formats import AnswerFormats
from quire.renderer.output_parsing.answer import Content, Piece
from quire.renderer.output_parsing.parser import OutputParser
from quire.sampling_params import SamplingParams

logger = logging.getLogger("quire.server")


@dataclass(slots=True)
class Counts:
    """For `usage`: filled while outputs pass by."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    # of the first prompt that was computed
    first_miss: str = ""
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0

    def usage(self) -> Usage:
        num_rejected = self.num_drafted_tokens - self.num_accepted_tokens
        return Usage(
            self.num_prompt_tokens,
            self.num_generated_tokens,
            self.num_prompt_tokens + self.num_generated_tokens,
            CachedTokens(self.num_cached_tokens, self.first_miss or msgspec.UNSET),
            CompletionTokens(self.num_reasoning_tokens, self.num_accepted_tokens, num_rejected),
        )


@dataclass(slots=True)
class Work:
    """What one HTTP request asks of the engine. Choice j of prompt i has the number i * n + j."""

    model: ServedModel
    prompts: list[list[int]]
    params: GenerationParams
    prepared: list[Any]
    # on whose behalf
    caller: Caller = field(default_factory=current_caller)
    # its places, once it was accepted
    reservation: Reservation | None = None
    # what its client calls things, where that differs
    names: Mapping[str, str] = field(default_factory=dict)
    # how to take its answers apart; None: they are text
    formats: AnswerFormats | None = None
    counts: Counts = field(default_factory=Counts)
    # what stands before each answer
    echo: str = ""
    # what of it is another server's; most have no such part
    transfer: NoTransfer = field(default_factory=NoTransfer)
    # its answer tells what it took
    shows_times: bool = False
    # of its prompts, once it runs
    _observers: Sequence[RequestObserver] = ()
    _answers: dict[int, _Answer] = field(default_factory=dict)

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        prompts: Sequence[RenderedPrompt],
        params: GenerationParams,
        body: GenerationFields,
        *,
        names: Mapping[str, str] | None = None,
        prompt_names: Sequence[str] = (),
    ) -> Work:
        """Raises RequestError for what the engine cannot do, before a first byte is sent; `names` are the client's for
        other fields, and so are `prompt_names`, of each prompt where there are several."""
        caller = current_caller()
        options = _options_of(model, caller, body)
        names = {**form_names(body), **(names or {})}
        prepared: list[Any] = []
        transfer = transfer_of(body, model)
        try:
            for prompt in prompts:
                prepared.append(transfer.prepared(await model.engine.prepare(prompt, params, **options)))
                if not body.stream and isinstance(prepared[-1], PreparedRequest):
                    request = prepared[-1].request
                    # what comes behind a stop string would be in vain
                    request.in_bursts = not request.sampling.stop
        except RequestError as error:
            its = {"prompt": prompt_names[len(prepared)]} if prompt_names else {}
            raise _in_words_of_the_client(error, params, {**names, **its}) from None
        token_ids = [prompt.token_ids for prompt in prompts]
        return cls(model, token_ids, params, prepared, caller, names=names, transfer=transfer)

    @classmethod
    async def receive(
        cls,
        model: ServedModel,
        pieces: AsyncIterator[str | list[int]],
        params: GenerationParams,
        body: CompletionRequest,
    ) -> Work:
        """The same for a prompt that is computed while it arrives; it has arrived then, and runs."""
        caller = current_caller()
        options = _options_of(model, caller, body)
        options["add_special_tokens"] = body.add_special_tokens is not False
        reservation = caller.admission.admit(caller.tenant, [(num_sequences(params), 0)], is_arriving=True)
        try:
            with within_time(caller.admission, reservation, is_arriving=True):
                received = await model.engine.receive(pieces, params, **options)
        except BaseException as error:
            reservation.close()
            if isinstance(error, RequestError):
                raise _in_words_of_the_client(error, params, form_names(body)) from None
            raise
        prompt = received.request.prompt_token_ids
        reservation.begin(0)
        reservation.add_tokens(num_prompt=len(prompt))
        return cls(model, [prompt], params, [received], caller, reservation)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def num_top(self, asked: int | None) -> int | None:
        """Log-probabilities at each position; -1 asks for those of all tokens."""
        if isinstance(self.params, SamplingParams) and self.params.logprob_token_ids is not None:
            return ALL
        return self.model.engine.config.facts.vocab_size if asked == -1 else asked

    def accepted(self) -> Reservation:
        """Places for all its prompts, or 429."""
        if self.reservation is None:
            count = num_sequences(self.params)
            sizes = [(count, len(prompt)) for prompt in self.prompts]
            try:
                self.reservation = self.caller.admission.admit(self.caller.tenant, sizes)
            except RequestError as error:
                raise _in_words_of_the_client(error, self.params, self.names) from None
        return self.reservation

    def give_up(self) -> None:
        """It is over, or nothing will come of it: its places are free. May be called again."""
        if self.reservation is not None:
            self.reservation.close()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[Stream[OutputDelta]]:
        """Starts it. Raises 429 before anything, if there is no room. What still runs at the end is aborted."""
        trace = current_trace.get()
        if trace is not None:
            trace.describe(self._description())
        with closing(self.accepted()) as reservation, within_time(self.caller.admission, reservation):
            self._observers = self._observed()
            observer = _WorkObserver(self, reservation, self._observers)
            try:
                generation = self._with_judged_calls(await self.model.engine.open_all(self.prepared, observer))
            except BaseException as error:
                observer.end("error" if isinstance(error, Exception) else "abort")
                raise
            async with aclosing(generation):
                yield generation

    def _observed(self) -> list[RequestObserver]:
        """One for each prompt."""
        metrics = self.model.metrics
        now = time.monotonic()
        n = self.params.n
        most = self.params.max_tokens
        return [metrics.observe_request(len(prompt), now, n=n, max_tokens=most) for prompt in self.prompts]

    def _with_judged_calls(self, generation: Stream[OutputDelta]) -> Stream[OutputDelta]:
        """Where hooks are to see calls of tools before a client does."""
        hooks = self.model.engine.hooks
        if self.formats is None or not hooks.judging_calls:
            return generation
        sampling = self.params if isinstance(self.params, SamplingParams) else self.params.sampling_params()
        tenant = self.caller.tenancy.name if self.caller.tenancy is not None else ""

        def request_of(index: int) -> HookedRequest:
            number = index // self.params.n
            prepared = self.prepared[number]
            # a turn of a session gets its number later
            request_id = prepared.request.request_id if isinstance(prepared, PreparedRequest) else -1
            return hooked_request(request_id, self.prompts[number], sampling, tenant, self.model.renderer)

        return JudgedCalls(generation, hooks, request_of)

    async def usage(self) -> Usage:
        """When all was seen. The thoughts of long answers are counted beside the event loop."""
        self.counts.num_reasoning_tokens = await total_reasoning_tokens(
            self.model.count_threads,
            self.model.renderer,
            self.prompts[0],
            self.params,
            [(answer.token_ids, answer.parser.thoughts) for answer in self._answers.values()],
        )
        return self.counts.usage()

    def times(self) -> dict[str, float] | UnsetType:
        """Where they are shown; of several prompts there is no one time."""
        if not self.shows_times or len(self._observers) != 1:
            return UNSET
        return self._observers[0].times()

    def read(self, delta: OutputDelta) -> None:
        """Takes what is new in one answer apart, where there is something to look for."""
        assert self.formats is not None
        answer = self._answers.get(delta.index)
        if answer is None:
            answer = self._answers[delta.index] = _Answer(self.formats.open_parser())
        answer.token_ids += delta.token_ids
        delta.pieces = answer.parser.push(delta.text, is_last=delta.finish_reason is not None)
        delta.finish_reason = answer.parser.finish_reason(delta.finish_reason)

    def _description(self) -> dict[str, Any]:
        """For traces."""
        return {
            "gen_ai.request.model": self.model.engine.config.served_model_name,
            "gen_ai.request.choice.count": self.params.n,
            "gen_ai.request.max_tokens": self.params.max_tokens,
            "gen_ai.request.temperature": self.params.temperature,
        }


@dataclass(slots=True)
class _Answer:
    """One that is taken apart, with its tokens, of which some are thoughts."""

    parser: OutputParser
    token_ids: list[int] = field(default_factory=list)


def pieces_of(delta: OutputDelta) -> Sequence[Piece]:
    """What is new, for a dialect that tells thoughts and calls from text."""
    if delta.pieces is not None:
        return delta.pieces
    return [Content(delta.text)] if delta.text else ()


async def count_input(preparing: Awaitable[Work]) -> int:
    """Tokens of the prompt, also of one that is too long for the model. Raises what else is wrong with it, and what is
    refused by its characters, before it becomes tokens."""
    try:
        return len((await preparing).prompts[0])
    except ContextLengthError as error:
        if error.num_prompt_tokens is None:
            raise
        return error.num_prompt_tokens


def num_sequences(params: GenerationParams) -> int:
    """What a prompt needs places for."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def _options_of(model: ServedModel, caller: Caller, body: GenerationFields) -> dict[str, Any]:
    return {
        "priority": caller.priority(body.priority),
        "cache_salt": body.cache_salt or "",
        "tenant": caller.tenancy,
        "lora_request": model.adapter,
    }


def _in_words_of_the_client(error: RequestError, params: GenerationParams, names: Mapping[str, str]) -> RequestError:
    return renamed(error, {**names, **(BEAM_NAMES if isinstance(params, BeamSearchParams) else {})})


class _WorkObserver:
    """Hears of all that comes before its reader does (an OutputObserver): counted, timed, read."""

    def __init__(self, work: Work, reservation: Reservation, observers: Sequence[RequestObserver]) -> None:
        params = work.params
        self._work = work
        self._n = params.n
        self._has_formats = work.formats is not None
        self._reservation = reservation
        self._transfer = work.transfer
        self._counts = work.counts
        self._counts.num_prompt_tokens = sum(map(len, work.prompts))
        # of each prompt
        self._num_open = [params.n] * len(work.prompts)
        self._observers = observers

    def see(self, delta: OutputDelta) -> None:
        now = time.monotonic()
        number, index = divmod(delta.index, self._n)
        observer = self._observers[number]
        if delta.num_cached_tokens is not None:
            self._reservation.begin(number)
            self._reservation.add_tokens(num_cached=delta.num_cached_tokens)
            self._counts.num_cached_tokens += delta.num_cached_tokens
            self._counts.first_miss = self._counts.first_miss or delta.first_miss
            observer.started(delta.num_cached_tokens, now)
        if delta.share_of_others is not None:
            observer.interfered(delta.share_of_others)
        num_tokens = len(delta.token_ids)
        if num_tokens:
            self._counts.num_generated_tokens += num_tokens
            self._reservation.add_generated(num_tokens)
            observer.tokens(num_tokens, now, index)
        if delta.finish_reason is not None:
            self._see_end(number, delta)
        self._transfer.see(number, delta)
        if self._has_formats:
            self._work.read(delta)

    def fail(self) -> None:
        self.end("error")

    def close(self) -> None:
        """Whoever leaves before the end aborts."""
        self.end("abort")

    def end(self, how: str) -> None:
        """Without effect on what has ended."""
        for observer in self._observers:
            observer.finished(how, time.monotonic())

    def _see_end(self, number: int, delta: OutputDelta) -> None:
        """OpenAI's clients know no other ends than these: any other is an error, not a finish reason."""
        self._counts.num_drafted_tokens += delta.num_drafted_tokens
        self._counts.num_accepted_tokens += delta.num_accepted_tokens
        if delta.finish_reason not in ("stop", "length", STOPPED):
            logger.error("a sequence ended with %s: %s", delta.finish_reason, delta.stop_reason)
            raise internal("The request failed while it ran.")
        self._num_open[number] -= 1
        if not self._num_open[number]:
            self._observers[number].finished(delta.finish_reason, time.monotonic())
