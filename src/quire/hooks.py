"""What the author of a hook imports (docs/hooks.md).

    class NoSecrets(Hook):
        def on_tokens(self, tokens):
            place = tokens.text.find("secret")
            if place >= 0:
                return Verdict(stop="no secrets", keep=tokens.tokens_before(place))
            return Verdict(hold=8)

A hook is one object for all requests. Its methods run in threads, several at once, beside the engine; what belongs to
one sequence stands in `tokens.state`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from quire.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class HookedRequest:
    """A request as hooks see it."""

    request_id: int
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    # of the API key, if there is one
    tenant: str = ""
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    encode: Callable[[str], list[int]] = field(repr=False)

    @cached_property
    def prompt(self) -> str:
        """As text, made of its tokens."""
        return self.decode(self.prompt_token_ids)


@dataclass(frozen=True, kw_only=True)
class SequenceTokens:
    """One sequence so far. The client has the first `num_shown` tokens."""

    request: HookedRequest
    index: int
    token_ids: Sequence[int]
    num_shown: int
    text: str
    # characters of the text that are begun with each of the tokens
    lengths: Sequence[int] = field(repr=False)
    # nothing follows
    is_last: bool
    # of this hook and sequence
    state: dict[str, Any]

    def tokens_before(self, character: int) -> int:
        """So many first tokens have no character of the text from there on."""
        return bisect_right(self.lengths, max(0, character))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What becomes of a sequence. None in its place: it goes on, and everything is shown."""

    # so many of its last tokens are not shown before the next verdict
    hold: int = 0
    # why it ends here; the client gets finish reason content_filter, and this as stop reason
    stop: str | None = None
    # with stop: its first tokens that are shown; None: all that are not held
    keep: int | None = None
    # only of a hook in lockstep: tokens that come next, those that may not be sampled before the next verdict, and
    # those that alone may be
    force: Sequence[int] = ()
    ban: Sequence[int] = ()
    allow: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request that is not to run, or a call that is not to be made: why, for the client."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HookedCall:
    """A call of a tool that the model has made; `arguments` is its JSON text."""

    request: HookedRequest
    index: int
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class FinishedSequence:
    """A sequence that has ended, with what the client has of it."""

    request: HookedRequest
    index: int
    token_ids: Sequence[int]
    finish_reason: str
    stop_reason: int | str | None


class HookEngine(Protocol):
    """What a hook may ask of the engine: requests like any other, which share its steps and are not hooked."""

    def embed(
        self, prompts: Sequence[str | Sequence[int]], pooling: str | None = None, adapter: str | None = None
    ) -> list[list[float]]:
        """A vector of each; waits. `pooling`: last, mean, or what the model's authors say. `adapter`: the name of one
        that is loaded, which makes another model of this one."""

    def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, adapter: str | None = None
    ) -> str:
        """The text that follows; waits."""


class Hook:
    """Methods that look and judge; each does nothing unless a hook says otherwise."""

    # it is asked when so many more tokens have come
    stride: int = 1
    # A sequence waits for its verdicts, which may then force and mask what comes next.
    lockstep: bool = False
    # otherwise a sequence may be so many tokens ahead of its verdict
    ahead: int = 64
    # of one call; None: the engine's option hook_timeout
    timeout: float | None = None
    # "open": where it fails, everything is allowed; "closed": the sequence ends; None: the option hook_on_failure
    on_failure: str | None = None

    def open(self, engine: HookEngine) -> None:
        """Called once, before the first request."""

    def close(self) -> None:
        """The engine has ended."""

    def on_admit(self, request: HookedRequest) -> Refusal | None:
        """Before it is sent to the engine."""
        return None

    def on_tokens(self, tokens: SequenceTokens) -> Verdict | None:
        """None of what is new has been shown."""
        return None

    def on_tool_call(self, call: HookedCall) -> HookedCall | Refusal | None:
        """Another call takes its place; a refusal is a text in the answer. Of servers, which look for calls."""
        return None

    def on_finish(self, sequence: FinishedSequence) -> None:
        """Nobody waits for it."""


# those that are asked about requests
METHODS = ("on_admit", "on_tokens", "on_tool_call", "on_finish")


def has(hook: Hook, method: str) -> bool:
    """Whether it says something there."""
    return getattr(getattr(hook, method), "__func__", None) is not getattr(Hook, method)


__all__ = [
    "FinishedSequence",
    "Hook",
    "HookEngine",
    "HookedCall",
    "HookedRequest",
    "Refusal",
    "SequenceTokens",
    "Verdict",
]
