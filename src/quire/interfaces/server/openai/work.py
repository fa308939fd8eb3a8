"""What one HTTP request asks of the engine, checked and not started; and what it came to, for `usage`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.beam_search_params import BeamSearchParams, GenerationParams
from quire.errors import RequestError
from quire.interfaces.server.access.caller import Caller, Reservation, current_caller
from quire.interfaces.server.access.time_limits import within_time
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.server.openai import beam_search
from quire.interfaces.server.openai.responses import Usage, usage_of
from quire.interfaces.server.wire.errors import renamed
from quire.renderer import RenderedPrompt


@dataclass(slots=True)
class Work:
    """What one HTTP request asks of the engine, checked and not started."""

    prompts: list[list[int]]
    params: GenerationParams
    prepared: list[Any]
    # on whose behalf
    caller: Caller = field(default_factory=current_caller)
    # its places, once it was accepted
    reservation: Reservation | None = None
    # what its client calls things, where that differs
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    async def prepare(
        cls,
        engine: ServedEngine,
        prompts: Sequence[list[int] | RenderedPrompt],
        params: GenerationParams,
        *,
        priority: int,
        cache_salt: str,
        names: Mapping[str, str] | None = None,
        prompt_names: Sequence[str] = (),
    ) -> Work:
        """Raises RequestError for what the engine cannot do, before a first byte is sent; `names` are the client's, and
        so are `prompt_names`, of each prompt where there are several."""
        caller = current_caller()
        whose: dict[str, Any] = {
            "priority": caller.priority(priority),
            "cache_salt": cache_salt,
            "tenant": caller.tenancy,
        }
        prepared: list[Any] = []
        try:
            for prompt in prompts:
                prepared.append(await engine.prepare(prompt, params, **whose))
        except RequestError as error:
            its = {"prompt": prompt_names[len(prepared)]} if prompt_names else {}
            raise _in_words_of_the_client(error, params, {**(names or {}), **its}) from None
        token_ids = [prompt if isinstance(prompt, list) else prompt.token_ids for prompt in prompts]
        return cls(token_ids, params, prepared, caller, names=names or {})

    @classmethod
    async def receive(
        cls,
        engine: ServedEngine,
        pieces: AsyncIterator[str | list[int]],
        params: GenerationParams,
        *,
        priority: int,
        cache_salt: str,
        add_special_tokens: bool,
        names: Mapping[str, str] | None = None,
    ) -> Work:
        """The same for a prompt that is computed while it arrives; it has arrived then, and runs."""
        caller = current_caller()
        whose: dict[str, Any] = {
            "priority": caller.priority(priority),
            "cache_salt": cache_salt,
            "tenant": caller.tenancy,
        }
        reservation = caller.admission.admit([(num_sequences(params), 0)], is_arriving=True)
        try:
            with within_time(caller.admission, reservation, is_arriving=True):
                received = await engine.receive(pieces, params, add_special_tokens=add_special_tokens, **whose)
        except BaseException as error:
            reservation.close()
            if isinstance(error, RequestError):
                raise _in_words_of_the_client(error, params, names) from None
            raise
        prompt = received.request.prompt_token_ids
        reservation.begin(0)
        reservation.add_tokens(num_prompt=len(prompt))
        return cls([prompt], params, [received], caller, reservation)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def accepted(self) -> Reservation:
        """Places for all its prompts, or 429."""
        if self.reservation is None:
            count = num_sequences(self.params)
            sizes = [(count, len(prompt)) for prompt in self.prompts]
            try:
                self.reservation = self.caller.admission.admit(sizes)
            except RequestError as error:
                raise _in_words_of_the_client(error, self.params, self.names) from None
        return self.reservation


def num_sequences(params: GenerationParams) -> int:
    """What a prompt needs places for."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def _in_words_of_the_client(
    error: RequestError, params: GenerationParams, names: Mapping[str, str] | None
) -> RequestError:
    return renamed(error, {**(names or {}), **(beam_search.NAMES if isinstance(params, BeamSearchParams) else {})})


@dataclass(slots=True)
class Counts:
    """For `usage`: filled while outputs pass by."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_reasoning_tokens: int = 0

    def usage(self) -> Usage:
        drafts = self.num_drafted_tokens, self.num_accepted_tokens
        generated = self.num_generated_tokens, self.num_cached_tokens
        return usage_of(self.num_prompt_tokens, *generated, *drafts, self.num_reasoning_tokens)
