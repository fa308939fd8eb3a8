"""Pinned prefixes (3.4.4, shared prefix): beginnings of prompts that are computed once and never evicted.

    llm.pin_prefix("You are a helpful assistant.\n", name="helpful")

Later prompts that begin with these tokens use their blocks by themselves, the partly filled last one included. Owns no
memory: the core keeps and pins; here are the calls that it takes, the checks and the names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import OptionError, RequestError, suggestion
from quire.interfaces.engine_calls import EngineCalls, control, release_if_kept
from quire.interfaces.handles import PINNED, checked_name, free_name
from quire.interfaces.prefix_file import read_prefix_file
from quire.interfaces.prompts import Prompt, check_no_media, check_unsalted, render
from quire.interfaces.requests import RequestMaker
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import RenderedPrompt, Renderer

logger = logging.getLogger(__name__)

NAME_IS_TAKEN = "prefix_exists"
NOT_FOUND = "prefix_not_found"
# The prompt pass is all that is wanted: one token more is sampled, and forgotten when the prefix is pinned.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
# Between its computation and its pinning a prefix may lose blocks to other requests; then it is computed again.
_MOST_ATTEMPTS = 3
_MORE_MEMORY = "unpin something or give the KV cache more memory."
# What the core says of a request or of a handle, and what it means for a prefix.
_ADVICE_ON_REQUESTS = "Lower max_tokens, or give the KV cache more memory."
_ADVICE_ON_HANDLES = "Pin less, or give the cache more memory."


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """What a pinned prefix holds, and how often prompts have begun with it."""

    name: str
    num_tokens: int
    num_blocks: int
    num_hits: int
    num_hit_tokens: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> PinnedPrefix:
        """From an entry of the core's list."""
        return cls(
            name=str(entry["handle"]).removeprefix(PINNED),
            num_tokens=entry["num_tokens"],
            num_blocks=entry["num_blocks"],
            num_hits=entry["num_hits"],
            num_hit_tokens=entry["num_hit_tokens"],
        )


class PinnedPrefixes:
    """What is pinned in one engine, and in those that take its place."""

    def __init__(self, config: EngineConfig, maker: RequestMaker, renderer: Renderer) -> None:
        self._is_possible = config.enable_prefix_caching
        self._maker = maker
        self._renderer = renderer
        # two callers may come at the same time
        self._names_under_way: set[str] = set()
        # what a new engine has to compute again: tokens and salt by name
        self._pinned: dict[str, tuple[list[int], str]] = {}

    def token_ids_of(self, prompt: Prompt | RenderedPrompt | Sequence[Mapping[str, Any]]) -> list[int]:
        """A text, token ids, or a chat. A chat ends without the assistant's opening, so that further turns fit."""
        field = _field_of(prompt)
        try:
            token_ids = self._rendered(prompt)
            # refused here, where it is known how they were given
            self._maker.make(token_ids, _ONE_TOKEN)
        except RequestError as error:
            if error.param == "prompt":
                text = str(error).replace("Shorten the prompt", "Shorten it")
                if field == "token_ids" and text.startswith("prompt_token_ids["):
                    text = text.removeprefix("prompt_")
                error.args = (field + text.removeprefix("prompt") if text.startswith("prompt:") else text,)
                error.param = field
            raise
        return token_ids

    def _rendered(self, prompt: Any) -> list[int]:
        check_unsalted(prompt, "it belongs to the prefix, not to its text. Give it to pin_prefix.")
        length = self._maker.limits.max_model_len
        if _is_chat(prompt):
            rendered = self._renderer.render_prompt(prompt, add_generation_prompt=False, max_tokens=length)
        else:
            rendered = render(prompt, self._renderer, length)
        check_no_media(rendered.media, "a pinned prefix")
        return rendered.token_ids

    async def pin(
        self, engine: EngineCalls, token_ids: list[int], name: str | None = None, cache_salt: str = ""
    ) -> PinnedPrefix:
        """Computes the prefix, keeps it and pins it."""
        if not self._is_possible:
            raise RequestError(
                "enable_prefix_caching=False: prefixes cannot be pinned, because prompts find them in the prefix "
                "cache. Start the engine without this option."
            )
        taken = {prefix.name for prefix in await self.all(engine)} | self._names_under_way
        name = free_name("prefix", taken) if name is None else checked_name(name, "pinned prefix")
        if name in taken:
            raise RequestError(
                f"name={name!r}: a prefix of this name is pinned already. Unpin it first, or choose another name.",
                param="name",
                code=NAME_IS_TAKEN,
            )
        self._names_under_way.add(name)
        try:
            prefix = await self._compute_and_pin(engine, token_ids, name, cache_salt)
            self._pinned[name] = (token_ids, cache_salt)
            return prefix
        finally:
            self._names_under_way.discard(name)

    async def unpin(self, engine: EngineCalls, name: str) -> None:
        """Its blocks become cached ones, which may be evicted."""
        await self._check_known(engine, name)
        await control(engine, "release_kept", handle=PINNED + name)
        self._pinned.pop(name, None)

    async def all(self, engine: EngineCalls) -> list[PinnedPrefix]:
        entries = await control(engine, "list_kept")
        return [PinnedPrefix.of(entry) for entry in entries if entry["is_pinned"] and _is_ours(entry)]

    async def pin_file(self, engine: EngineCalls, path: str) -> None:
        """All prefixes of the start-up file; the first that cannot be pinned ends the start."""
        for spec in read_prefix_file(path):
            try:
                pinned = await self.pin(engine, self.token_ids_of(spec.prompt), spec.name, spec.cache_salt)
            except RequestError as error:
                raise OptionError(f"pinned_prefixes={path}: prefix {spec.name!r} cannot be pinned: {error}") from error
            logger.info("pinned prefix %s: %d tokens, %d blocks", pinned.name, pinned.num_tokens, pinned.num_blocks)

    async def pin_again(self, engine: EngineCalls) -> None:
        """All that was pinned and is not there, in an engine that has taken the place of another. One that has no room
        now is lost."""
        if not self._pinned:
            return
        there = {prefix.name for prefix in await self.all(engine)}
        for name, (token_ids, cache_salt) in list(self._pinned.items()):
            if name in there:
                continue
            try:
                await self._compute_and_pin(engine, token_ids, name, cache_salt)
            except RequestError as error:
                del self._pinned[name]
                logger.error("prefix %s cannot be pinned again: %s", name, error)

    async def _compute_and_pin(
        self, engine: EngineCalls, token_ids: list[int], name: str, cache_salt: str
    ) -> PinnedPrefix:
        handle = PINNED + name
        try:
            return await self._attempts(engine, handle, token_ids, cache_salt)
        except RequestError as error:
            await release_if_kept(engine, handle)
            error.args = (await _for_the_caller(engine, str(error), handle),)
            raise
        except BaseException:
            # Nothing stays half done. Interrupted, the request is aborted before this is asked; and the engine may be
            # dead, but then the first error counts.
            await release_if_kept(engine, handle)
            raise

    async def _attempts(self, engine: EngineCalls, handle: str, token_ids: list[int], cache_salt: str) -> PinnedPrefix:
        for _ in range(_MOST_ATTEMPTS):
            await engine.compute(self._maker.make(token_ids, _ONE_TOKEN, cache_salt=cache_salt, keep=handle))
            try:
                return PinnedPrefix.of(await control(engine, "pin_kept", handle=handle, num_tokens=len(token_ids)))
            except RequestError:
                if await self._num_computed(engine, handle) >= len(token_ids):
                    raise
        raise RequestError(
            f"name={handle.removeprefix(PINNED)!r}: the prefix was computed {_MOST_ATTEMPTS} times, and each time "
            "running requests took its blocks before it was pinned. Wait until they have ended, or "
            f"{_MORE_MEMORY}"
        )

    async def _num_computed(self, engine: EngineCalls, handle: str) -> int:
        entries = await control(engine, "list_kept")
        return next((entry["num_computed_tokens"] for entry in entries if entry["handle"] == handle), 0)

    async def _check_known(self, engine: EngineCalls, name: str) -> None:
        names = [prefix.name for prefix in await self.all(engine)]
        if name not in names:
            shown = str(name)[:64]
            raise RequestError(
                f"name={shown!r}: no prefix of this name is pinned.{suggestion(shown, names)}",
                param="name",
                code=NOT_FOUND,
            )


def _is_ours(entry: Mapping[str, Any]) -> bool:
    return str(entry["handle"]).startswith(PINNED)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _field_of(prompt: object) -> str:
    """The field of a request to pin that holds such a prompt."""
    if _is_chat(prompt):
        return "messages"
    has_tokens = isinstance(prompt, list | tuple) or (isinstance(prompt, Mapping) and "prompt_token_ids" in prompt)
    return "token_ids" if has_tokens else "text"


async def _for_the_caller(engine: EngineCalls, reason: str, handle: str) -> str:
    """The core's reason, in the words of whoever asked for the prefix."""
    reason = reason.replace(f"handle {handle!r}", f"name={handle.removeprefix(PINNED)!r}").replace(PINNED, "")
    better = _MORE_MEMORY[0].upper() + _MORE_MEMORY[1:]
    if _ADVICE_ON_HANDLES in reason:
        state = await control(engine, "statistics")
        if any(state.get(name) for name in ("num_requests_running", "num_requests_waiting")):
            better = f"Wait until running requests have ended, or {_MORE_MEMORY}"
        else:
            # nobody was accepted
            reason = reason.replace("belongs to requests that were accepted", "is pinned, or free for a request")
    for advice in (_ADVICE_ON_REQUESTS, _ADVICE_ON_HANDLES):
        reason = reason.replace(advice, better)
    return reason
