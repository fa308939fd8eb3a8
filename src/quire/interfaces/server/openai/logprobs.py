"""Log-probabilities in the shapes of the two endpoints. Never NaN or infinity in JSON: minus infinity is -9999.

A whole answer may have a million of them. They become JSON in parts, between which the event loop serves others.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.interfaces.server.openai.responses import CompletionLogprobs, TokenLogprob, TopLogprob
from quire.interfaces.turnstile import Turnstile
from quire.outputs import Logprob, Logprobs, PromptLogprobs
from quire.renderer import Renderer

_LOWEST = -9999.0
# of all that the engine gave, whatever their ranks
ALL = -1
# of one turn of the event loop: with 20 log-probabilities each they take 2 to 3 ms
_TOKENS_OF_TURN = 32
_ENTRIES_OF_TURN = 1024


def finite(value: float) -> float:
    return value if math.isfinite(value) and value > _LOWEST else _LOWEST


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called: their texts, or their numbers for clients that must tell all of them apart."""

    renderer: Renderer
    are_ids: bool = False

    def of(self, token_id: int, entry: Logprob | None = None) -> str:
        if self.are_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.renderer.token_text(token_id)


def _best(position: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The `count` most probable tokens; the chosen one is among them only if it is one of them."""
    if count == ALL:
        return list(position.items())
    ranked = sorted(position.items(), key=lambda item: (item[1].rank or 1, -item[1].logprob))
    return [(token_id, entry) for token_id, entry in ranked if (entry.rank or 1) <= count][:count]


def chat_logprobs(names: TokenNames, token_ids: Sequence[int], logprobs: Logprobs, num_top: int) -> list[TokenLogprob]:
    """One entry a token; `bytes` of several tokens join to the characters they share."""
    renderer = names.renderer
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        chosen = position[token_id]
        top = [
            TopLogprob(names.of(other, entry), finite(entry.logprob), list(renderer.token_bytes(other)))
            for other, entry in _best(position, num_top)
        ]
        data = list(renderer.token_bytes(token_id))
        content.append(TokenLogprob(names.of(token_id, chosen), finite(chosen.logprob), data, top))
    return content


async def _parts(positions: PromptLogprobs | Logprobs, turns: Turnstile) -> AsyncIterator[slice]:
    """Others have their turn after each, and all who do this together have no more of one than `turns` says."""
    # the first one of a prompt has none
    num_entries = len(positions[-1] or ()) if positions else 0
    step = min(_TOKENS_OF_TURN, max(1, _ENTRIES_OF_TURN // max(1, num_entries)))
    for start in range(0, len(positions), step):
        await turns.enter(step * max(1, num_entries))
        yield slice(start, start + step)
        await asyncio.sleep(0)


def _encoded(values: Iterable[Any]) -> list[Any]:
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


class CompletionLogprobsBuilder:
    """Columns, with each token's place in the text of its choice, counted in characters."""

    def __init__(self, names: TokenNames, num_top: int, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._renderer = names.renderer
        self._num_top = num_top
        self._skip_special = skip_special_tokens
        # characters of the text that have begun so far
        self._num_started = 0

    def build(self, token_ids: Sequence[int], positions: PromptLogprobs | Logprobs) -> CompletionLogprobs:
        """The next tokens of the choice; a position without log-probabilities is the first of a prompt."""
        columns = CompletionLogprobs()
        for token_id, position in zip(token_ids, positions, strict=True):
            columns.text_offset.append(self._advance(token_id))
            if position is None:
                columns.tokens.append(self._names.of(token_id))
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            chosen = position[token_id]
            columns.tokens.append(self._names.of(token_id, chosen))
            columns.token_logprobs.append(finite(chosen.logprob))
            columns.top_logprobs.append(self._top(position, token_id, chosen))
        return columns

    async def build_whole(
        self, token_ids: list[int], positions: PromptLogprobs | Logprobs, turns: Turnstile
    ) -> CompletionLogprobs:
        """The same of many tokens; the dictionaries are JSON already."""
        columns = CompletionLogprobs()
        async for part in _parts(positions, turns):
            new = self.build(token_ids[part], positions[part])
            new.top_logprobs = _encoded(new.top_logprobs)
            columns.extend(new)
        return columns

    def _top(self, position: dict[int, Logprob], token_id: int, chosen: Logprob) -> dict[str, float]:
        """The chosen one and the best ones, in vLLM's order; of two tokens with one text the more probable counts."""
        top: dict[str, float] = {}
        for other, entry in [(token_id, chosen), *_best(position, self._num_top)]:
            name = self._names.of(other, entry)
            top[name] = max(finite(entry.logprob), top.get(name, _LOWEST))
        return top

    def _advance(self, token_id: int) -> int:
        """Where the token begins: a token that continues a character begins where that character does."""
        data = self._renderer.token_bytes(token_id)
        if self._skip_special and not self._renderer.decode([token_id], skip_special_tokens=True):
            data = data if not _is_whole(data) else b""
        offset = self._num_started
        if data and _continues(data[0]) and offset:
            offset -= 1
        self._num_started += sum(not _continues(byte) for byte in data)
        return offset


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _is_whole(data: bytes) -> bool:
    """Whether the bytes are text by themselves: then a token that decodes to nothing is a special one."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


async def prompt_logprobs_json(prompt: PromptLogprobs, turns: Turnstile) -> list[Any]:
    """vLLM's extension: by token id. The entries are JSON already."""
    entries: list[Any] = []
    async for part in _parts(prompt, turns):
        entries += _encoded(map(_by_token_id, prompt[part]))
    return entries


def _by_token_id(position: dict[int, Logprob] | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        str(token_id): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
        for token_id, e in position.items()
    }
