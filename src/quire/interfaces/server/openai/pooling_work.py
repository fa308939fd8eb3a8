"""Requests that become numbers, vectors or probabilities: several inputs, of which some are in the engine at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta

from quire.errors import ContextLengthError
from quire.interfaces.server.access.caller import Caller, Reservation, current_caller, new_id
from quire.interfaces.server.access.in_flight import within_time
from quire.interfaces.server.openai.rendering import WHOLE, Cut, render, render_pair
from quire.interfaces.server.served_model import ServedModel
from quire.interfaces.server.wire.errors import in_words_of, invalid
from quire.interfaces.server.wire.prompt_forms import check_token_ids
from quire.observability.tracing import current_trace
from quire.outputs import EmbeddingRequestOutput
from quire.pooling_params import PoolingParams
from quire.renderer import RenderedPrompt

_T = TypeVar("_T")
# OpenAI's
MAX_INPUTS = 2048
_MOST_AT_ONCE = 64


class ScoringFields(msgspec.Struct, kw_only=True):
    """What a request for numbers of a head may say, whatever they are of."""

    model: Annotated[str | None, Meta(description="name of the served model; may be left out")] = None
    use_activation: Annotated[
        bool | None, Meta(description="vLLM's: false gives what the model's head says, and no probabilities")
    ] = None
    priority: Annotated[int | None, Meta(description="vLLM's: lower is served first, with the policy priority")] = None
    cache_salt: Annotated[str | None, Meta(description="vLLM's: only requests of the same salt share a cache")] = None


class PoolingUsage(msgspec.Struct):
    """OpenAI's `usage` of embeddings."""

    prompt_tokens: int
    total_tokens: int


class ListOf(msgspec.Struct, Generic[_T]):
    """An answer with an entry for each text."""

    id: str
    created: int
    model: str
    data: list[_T]
    usage: PoolingUsage
    object: str = "list"


@dataclass(frozen=True)
class PoolingInput:
    """A prompt, and what errors call it."""

    prompt: RenderedPrompt
    name: str

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)


async def inputs_of(
    model: ServedModel,
    given: Sequence[str | list[int]],
    names: Sequence[str],
    add_special_tokens: bool | None = None,
    cut: Cut = WHOLE,
) -> list[PoolingInput]:
    """Texts and lists of tokens, tokenised and checked."""

    async def prompt_of(one: str | list[int], name: str) -> RenderedPrompt:
        if isinstance(one, list):
            check_token_ids(one, model.engine.config.facts.vocab_size, name)
            return RenderedPrompt(cut.of(one))
        rendered = await render(model, one, cut=cut, add_special_tokens=add_special_tokens)
        if not rendered.token_ids:
            raise invalid(f"{name}: a text holds no tokens. Give at least one character.", name)
        return rendered

    num_tokens = sum(len(one) for one in given if isinstance(one, list))
    return await _inputs(model, [(one, name) for one, name in zip(given, names, strict=True)], num_tokens, prompt_of)


def padded(inputs: Sequence[PoolingInput], model: ServedModel) -> list[PoolingInput]:
    """As models want them that were trained on texts of one length, without a mask."""
    token_id = model.engine.config.facts.hf_config.get("pad_token_id")
    if type(token_id) is not int:
        raise invalid("padding=max_length: this model names no padding token (pad_token_id). Leave it out.", "padding")
    filled = []
    for one in inputs:
        filling = [token_id] * (model.max_model_len - one.num_tokens)
        filled.append(replace(one, prompt=replace(one.prompt, token_ids=[*one.prompt.token_ids, *filling])))
    return filled


async def pairs_of(
    model: ServedModel, pairs: Sequence[tuple[str, str]], first_name: str, names: Sequence[str]
) -> list[PoolingInput]:
    """Texts that a model reads two at a time. `names`: of the second ones, by which errors call both."""

    async def prompt_of(pair: tuple[str, str], name: str) -> RenderedPrompt:
        with in_words_of({"query": first_name, "document": name}):
            return await render_pair(model, *pair)

    return await _inputs(model, list(zip(pairs, names, strict=True)), 0, prompt_of)


async def _inputs(
    model: ServedModel,
    given: Sequence[tuple[Any, str]],
    num_tokens: int,
    prompt_of: Callable[[Any, str], Awaitable[RenderedPrompt]],
) -> list[PoolingInput]:
    caller = current_caller()
    caller.admission.check(caller.tenant, _window(caller, len(given)), num_tokens)
    inputs: list[PoolingInput] = []
    for one, name in given:
        with in_words_of({"prompt": name}):
            made = PoolingInput(await prompt_of(one, name), name)
        if made.num_tokens > model.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {model.max_model_len} tokens. However, your {name} resulted "
                f"in {made.num_tokens} tokens. Please reduce the length of the {name}.",
                param=name,
            )
        inputs.append(made)
        # between many short texts others have their turn
        await asyncio.sleep(0)
    return inputs


def _window(caller: Caller, num_inputs: int) -> int:
    """How many inputs of one request are in the engine at a time: no request fills the queue alone."""
    most = caller.admission.max_sequences(caller.tenant)
    return max(1, min(num_inputs, _MOST_AT_ONCE, num_inputs if most is None else most))


class _Asked(Protocol):
    """What every such request may say of how it is served."""

    priority: int | None
    cache_salt: str | None


class PoolingWork:
    """The inputs of one request on their way."""

    def __init__(
        self, inputs: list[PoolingInput], params: PoolingParams, task: str, model: ServedModel, asked: _Asked
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._params = params
        self._caller = current_caller()
        self._options: dict[str, Any] = {
            "task": task,
            "priority": self._caller.priority(asked.priority),
            "cache_salt": asked.cache_salt or "",
            "tenant": self._caller.tenancy,
            "lora_request": model.adapter,
        }

    @property
    def usage(self) -> PoolingUsage:
        num_tokens = sum(one.num_tokens for one in self._inputs)
        return PoolingUsage(num_tokens, num_tokens)

    async def outputs(self) -> list[EmbeddingRequestOutput]:
        """In the order of the inputs. The first that fails ends the others."""
        trace = current_trace.get()
        if trace is not None:
            trace.describe({"gen_ai.request.model": self._model.name})
        caller = self._caller
        count = _window(self._caller, len(self._inputs))
        places = [(1, one.num_tokens) for one in self._inputs[:count]]
        found: dict[int, EmbeddingRequestOutput] = {}
        with (
            closing(caller.admission.admit(caller.tenant, places)) as reservation,
            within_time(caller.admission, reservation),
        ):
            reservation.add_tokens(num_prompt=sum(one.num_tokens for one in self._inputs[count:]))
            left = iter(enumerate(self._inputs))
            tasks = [asyncio.ensure_future(self._take(left, found, reservation)) for _ in range(count)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [found[number] for number in range(len(self._inputs))]

    async def _take(
        self,
        left: Iterator[tuple[int, PoolingInput]],
        found: dict[int, EmbeddingRequestOutput],
        reservation: Reservation,
    ) -> None:
        """One input after the other, as long as there are some."""
        for number, one in left:
            found[number] = await self._output(number, one, reservation)

    async def _output(self, number: int, one: PoolingInput, reservation: Reservation) -> EmbeddingRequestOutput:
        observer = self._model.metrics.observe_pooling(one.num_tokens, time.monotonic())

        def started(num_cached_tokens: int) -> None:
            reservation.begin(number)
            reservation.add_tokens(num_cached=num_cached_tokens)
            observer.started(num_cached_tokens, time.monotonic())

        reason = "abort"
        try:
            with in_words_of({"prompt": one.name}):
                output = await self._model.engine.embed(one.prompt, self._params, on_start=started, **self._options)
            reason = "stop"
            return output
        except Exception:
            reason = "error"
            raise
        finally:
            observer.finished(reason, time.monotonic())


@dataclass(frozen=True)
class PoolingAnswer:
    """What becomes of numbers once all of them are there."""

    make: Callable[[], Awaitable[msgspec.Struct]]
    # the list of the answer that may be long
    long_field: str = "data"

    async def whole(self) -> msgspec.Struct:
        return await self.make()


def answer_of(
    form: type[ListOf[_T]], kind: str, model: str, usage: PoolingUsage, entries: Callable[[], Awaitable[list[_T]]]
) -> PoolingAnswer:
    """`kind`: begins the name of the answer."""

    async def whole() -> ListOf[_T]:
        data = await entries()
        return form(new_id(kind), int(time.time()), model, data, usage)

    return PoolingAnswer(whole)


async def entries_of(work: PoolingWork, entry: Callable[[int, EmbeddingRequestOutput], _T]) -> list[_T]:
    """Those of an answer, in the order of `input`; one after the other, so that others have their turn."""
    with in_words_of({"prompt": "input"}):
        outputs = await work.outputs()
    entries: list[_T] = []
    for index, output in enumerate(outputs):
        entries.append(entry(index, output))
        await asyncio.sleep(0)
    return entries
