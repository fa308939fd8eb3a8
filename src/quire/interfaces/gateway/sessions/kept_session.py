"""One session of a client: what was said, and the engine's session that holds it as tokens and blocks.

What was said is the truth. The engine's tokens are a beginning of it, or are made one before the next turn, so a turn
answers exactly what the same conversation would get if it were sent whole.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.beam_search_params import GenerationParams
from quire.interfaces.adapters import Adapter
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.generation import Generation, OutputObserver
from quire.interfaces.server.wire.errors import ApiError, invalid
from quire.interfaces.session import AsyncSession
from quire.renderer import RenderedPrompt


class Kind(enum.StrEnum):
    """Decided by the first turn: a chat goes through the template, a text is taken as it is."""

    CHAT = "chat"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Turn:
    """How long the session was after a turn."""

    num_tokens: int
    num_messages: int


@dataclass(slots=True)
class KeptSession:
    """Owned by one tenant. One turn at a time."""

    id: str
    tenant: str
    engine_session: AsyncSession
    created: float
    used: float
    created_at: int
    forked_from: str | None = None
    kind: Kind | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    is_busy: bool = False
    is_closed: bool = False
    # counts changes, so that a turn that was prepared before one is found out
    version: int = 0

    @property
    def num_tokens(self) -> int:
        return self.engine_session.num_tokens

    def check_free(self) -> None:
        if self.is_busy:
            raise ApiError(
                409,
                f"Session {self.id} is in the middle of a turn, and has one at a time. Wait for its end.",
                code="session_busy",
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """For whoever changes it: a rewind, a fork."""
        self.claim()
        try:
            yield
        finally:
            self.is_busy = False

    def claim(self) -> None:
        """For a turn, until its end."""
        self.check_free()
        self.is_busy = True

    def check_kind(self, kind: Kind) -> None:
        if self.kind not in (None, kind):
            other = "/messages" if self.kind is Kind.CHAT else "/completions"
            text = f"Session {self.id} is a {self.kind}: its turns go to {other}. Open another session for a {kind}."
            raise ApiError(409, text, code="session_kind")

    def kept_by(self, num_turns: int | None, num_tokens: int | None) -> tuple[int, list[Turn]]:
        """Tokens and turns that a rewind leaves."""
        if (num_turns is None) == (num_tokens is None):
            raise invalid("Give one of num_turns and num_tokens: what shall be left.", "num_turns")
        if num_turns is not None:
            if not 0 <= num_turns <= len(self.turns):
                raise invalid(f"num_turns={num_turns}: must be between 0 and {len(self.turns)}.", "num_turns")
            left = self.turns[:num_turns]
            # an answer may have come back from the template as fewer tokens than it was
            return min(left[-1].num_tokens if left else 0, self.num_tokens), left
        assert num_tokens is not None
        ends = [0, *(turn.num_tokens for turn in self.turns)]
        if self.kind is Kind.CHAT and num_tokens not in ends:
            shown = ", ".join(map(str, ends[-10:]))
            text = f"num_tokens={num_tokens}: a chat is rewound to the end of a turn. These end after {shown} tokens."
            raise invalid(text, "num_tokens")
        if not 0 <= num_tokens <= self.num_tokens:
            raise invalid(f"num_tokens={num_tokens}: must be between 0 and {self.num_tokens}.", "num_tokens")
        left = [turn for turn in self.turns if turn.num_tokens <= num_tokens]
        return num_tokens, left

    def turn_ended(self, messages: list[dict[str, Any]], kind: Kind, now: float) -> None:
        """What was said now, the answer included."""
        self.used = now
        self.kind = kind
        self.messages = messages
        self.turns = [*self.turns, Turn(self.num_tokens, len(messages))]
        self.version += 1

    def rewound(self, left: list[Turn]) -> None:
        self.turns = left
        del self.messages[left[-1].num_messages if left else 0 :]
        self.version += 1


@dataclass(frozen=True, slots=True)
class WholePrompt:
    """A turn that was checked: the whole conversation, and how to go on with it."""

    token_ids: list[int]
    params: GenerationParams
    adapter: Adapter | None


class TurnEngine:
    """The engine as one turn sees it. A prompt is the whole conversation; what the session lacks of it is computed."""

    def __init__(self, engine: AsyncLLM, kept: KeptSession) -> None:
        self._engine = engine
        self._kept = kept
        self._version = kept.version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def prepare(
        self, prompt: RenderedPrompt, sampling_params: Any, *, lora_request: Adapter | None = None, **settings: Any
    ) -> WholePrompt:
        """Checked as a request of its own would be: length, parameters, form."""
        if prompt.media:
            text = "a turn of a session takes text only. Leave images, videos and prompt_embeds out"
            raise invalid(f"messages: {text}, or send the chat without a session.", "messages")
        await self._engine.prepare(prompt, sampling_params, lora_request=lora_request, **settings)
        return WholePrompt(prompt.token_ids, sampling_params, lora_request)

    async def open_all(self, prepared: Sequence[WholePrompt], observer: OutputObserver) -> Generation:
        """A session takes one prompt at a time."""
        [whole] = prepared
        if self._kept.version != self._version:
            text = f"Session {self._kept.id} has changed since this turn was sent. Look at it, and send the turn again."
            raise ApiError(409, text, code="session_changed")
        self._kept.claim()
        try:
            session = self._kept.engine_session
            known = session.token_ids
            num_shared = shared_length(known, whole.token_ids)
            if num_shared < len(known):
                await session.rewind(num_shared)
            new = {"prompt_token_ids": whole.token_ids[num_shared:]}
            watch = _TurnWatch(self._kept, observer)
            return await session.open(new, whole.params, watch, lora_request=whole.adapter)
        except BaseException:
            self._kept.is_busy = False
            raise


class _TurnWatch:
    """The session is one turn's until its reader leaves."""

    def __init__(self, kept: KeptSession, observer: OutputObserver) -> None:
        self._kept = kept
        self._observer = observer
        self._is_over = False

    def see(self, delta: OutputDelta) -> None:
        if self._kept.is_closed and delta.finish_reason == "abort":
            text = f"Session {self._kept.id} was closed while this turn ran."
            raise ApiError(404, text, param="session_id", code="session_closed")
        self._observer.see(delta)

    def fail(self) -> None:
        self._observer.fail()

    def close(self) -> None:
        if not self._is_over:
            self._kept.is_busy = False
        self._is_over = True
        self._observer.close()


def shared_length(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((number for number, (one, other) in pairs if one != other), len(second))
