"""What the hooks of an engine say, together: of a request, of new tokens, of a call.

Each is asked in a call of its own, with its own patience. One that raises, hangs, or says what it may not say has
failed: then everything is allowed or nothing is, as its option says. Of several verdicts the strictest counts.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.errors import one_line
from quire.hooks import (
    METHODS,
    FinishedSequence,
    Hook,
    HookedCall,
    HookedRequest,
    HookEngine,
    Refusal,
    SequenceTokens,
    Verdict,
    has,
)
from quire.interfaces.hooks.calls import HookThreads, HookTimeoutError

if TYPE_CHECKING:
    from quire.renderer import Renderer

logger = logging.getLogger("quire.hooks")
OPEN = "open"
CLOSED = "closed"
# of a hook that fails all the time
_SECONDS_BETWEEN_LINES = 10.0
COUNTS = ("calls", "failures", "timeouts", "stops", "refusals")
_NOTHING_SAID = Verdict()

Cancel = Callable[[], None]


class BadVerdictError(Exception):
    """A hook says what it may not say."""


@dataclass(frozen=True)
class NamedHook:
    """A hook, what it is called, and what is done when it fails."""

    name: str
    hook: Hook
    timeout: float
    is_open: bool


class Hooks:
    """Those of one engine. Belongs to its event loop."""

    def __init__(self, hooks: Sequence[NamedHook]) -> None:
        self.counts = Counter({f"num_hook_{name}_total": 0 for name in COUNTS})
        self.renderer: Renderer | None = None
        self._hooks = tuple(hooks)
        self._by_method = {name: [one for one in hooks if has(one.hook, name)] for name in METHODS}
        self._threads = HookThreads()
        self._next_line: dict[str, float] = {}
        watching = [one.hook for one in self.watching]
        self.stride = min((max(1, hook.stride) for hook in watching), default=1)
        self.is_lockstep = any(hook.lockstep for hook in watching)
        ahead = min((hook.ahead for hook in watching), default=0)
        # A sequence has at most so many tokens that were not judged.
        self.ahead = self.stride if self.is_lockstep else max(self.stride, ahead)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    @property
    def watching(self) -> list[NamedHook]:
        """Those that look at tokens."""
        return self._by_method["on_tokens"]

    @property
    def admitting(self) -> list[NamedHook]:
        return self._by_method["on_admit"]

    @property
    def judging_calls(self) -> list[NamedHook]:
        return self._by_method["on_tool_call"]

    def open(self, engine: HookEngine) -> None:
        """Blocks: hooks may load what they need. What one raises ends the start."""
        for one in self._hooks:
            one.hook.open(engine)

    def close(self) -> None:
        for one in self._hooks:
            try:
                one.hook.close()
            except Exception:
                logger.exception("hook %s failed when it was closed", one.name)

    def statistics(self) -> dict[str, float]:
        return {**self.counts, "num_hook_calls_lost": self._threads.num_lost}

    # ------------------------------------------------------------------------------------------ questions

    def admit(self, request: HookedRequest, done: Callable[[str | None], None]) -> Cancel:
        """`done` hears why it is refused; None: it is not."""
        asked = [(one, partial(one.hook.on_admit, request)) for one in self.admitting]
        return self._ask(
            asked, checked_refusal, lambda one: Refusal(reason=_failed(one)), partial(self._admitted, done)
        )

    def _admitted(self, done: Callable[[str | None], None], refusals: list[Refusal | None]) -> None:
        reason = next((one.reason for one in refusals if one is not None), None)
        self.counts["num_hook_refusals_total"] += reason is not None
        done(reason)

    def judge(self, each: Sequence[SequenceTokens], done: Callable[[Verdict], None]) -> Cancel:
        """`each`: what every hook that looks at tokens sees. `done` hears the strictest verdict."""
        asked = [(one, partial(one.hook.on_tokens, tokens)) for one, tokens in zip(self.watching, each, strict=True)]
        return self._ask(
            asked, checked_verdict, lambda one: Verdict(stop=_failed(one), keep=0), partial(self._judged, done)
        )

    def _judged(self, done: Callable[[Verdict], None], verdicts: list[Verdict | None]) -> None:
        verdict = strictest([one for one in verdicts if one is not None])
        self.counts["num_hook_stops_total"] += verdict.stop is not None
        done(verdict)

    def judge_call(self, call: HookedCall, done: Callable[[HookedCall | Refusal], None]) -> Cancel:
        """One hook after the other: each sees what those before it have made of the call."""
        return _CallChain(self, call, done).cancel

    def finish(self, finished: FinishedSequence) -> None:
        """Nobody waits for what they do."""
        for one in self._by_method["on_finish"]:
            self._ask([(one, partial(one.hook.on_finish, finished))], _nothing, lambda one: None, lambda said: None)

    # ------------------------------------------------------------------------------------------ inside

    def _ask(
        self,
        asked: Sequence[tuple[NamedHook, Callable[[], Any]]],
        check: Callable[[NamedHook, Any], Any],
        closed: Callable[[NamedHook], Any],
        done: Callable[[list[Any]], None],
    ) -> Cancel:
        """All of them; `done` hears what they say, in their order, when the last has spoken."""
        answers: list[Any] = [None] * len(asked)
        left = len(asked)

        def take(number: int, one: NamedHook, said: Any, error: Exception | None) -> None:
            nonlocal left
            answers[number] = self._answer_of(one, said, error, check, closed)
            left -= 1
            if not left:
                done(answers)

        self.counts["num_hook_calls_total"] += len(asked)
        cancels = [
            self._threads.call(function, one.timeout, partial(take, number, one))
            for number, (one, function) in enumerate(asked)
        ]

        def cancel() -> None:
            for one in cancels:
                one()

        return cancel

    def _answer_of(
        self,
        one: NamedHook,
        said: Any,
        error: Exception | None,
        check: Callable[[NamedHook, Any], Any],
        closed: Callable[[NamedHook], Any],
    ) -> Any:
        if error is None:
            try:
                return check(one, said)
            except Exception as found:
                error = found
        self.counts["num_hook_failures_total"] += 1
        self.counts["num_hook_timeouts_total"] += isinstance(error, HookTimeoutError)
        self._log(one, error)
        return None if one.is_open else closed(one)

    def _log(self, one: NamedHook, error: Exception) -> None:
        now = time.monotonic()
        if now < self._next_line.get(one.name, 0.0):
            return
        self._next_line[one.name] = now + _SECONDS_BETWEEN_LINES
        logger.warning(
            "hook %s failed (%s: %s): %s; %d failures so far",
            one.name,
            type(error).__name__,
            one_line(error),
            "everything is allowed" if one.is_open else "nothing is allowed",
            self.counts["num_hook_failures_total"],
        )


class _CallChain:
    """A call of a tool on its way through the hooks."""

    def __init__(self, hooks: Hooks, call: HookedCall, done: Callable[[HookedCall | Refusal], None]) -> None:
        self._hooks = hooks
        self._left = list(hooks.judging_calls)
        self._call = call
        self._done = done
        self._cancel: Cancel = _nobody
        self._next()

    def cancel(self) -> None:
        self._cancel()

    def _next(self) -> None:
        one = self._left.pop(0)
        asked = [(one, partial(one.hook.on_tool_call, self._call))]
        self._cancel = self._hooks._ask(asked, checked_call, lambda one: Refusal(reason=_failed(one)), self._take)

    def _take(self, answers: list[HookedCall | Refusal | None]) -> None:
        [said] = answers
        if isinstance(said, Refusal):
            self._hooks.counts["num_hook_refusals_total"] += 1
            self._done(said)
            return
        if said is not None:
            self._call = replace(self._call, name=said.name, arguments=said.arguments)
        if self._left:
            self._next()
        else:
            self._done(self._call)


def _nobody() -> None:
    """Nothing is asked."""


def _failed(one: NamedHook) -> str:
    return f"hook {one.name} could not be asked"


def _nothing(one: NamedHook, said: Any) -> None:
    return None


# ---- what may be said ------------------------------------------------------------------------------------------------


def checked_refusal(one: NamedHook, said: Any) -> Refusal | None:
    if said is None or (isinstance(said, Refusal) and isinstance(said.reason, str)):
        return said
    raise BadVerdictError(f"on_admit returned {said!r}; None or Refusal(reason=text) is expected")


def checked_call(one: NamedHook, said: Any) -> HookedCall | Refusal | None:
    if said is None or (isinstance(said, Refusal) and isinstance(said.reason, str)):
        return said
    if isinstance(said, HookedCall) and isinstance(said.name, str) and isinstance(said.arguments, str):
        return said
    raise BadVerdictError(f"on_tool_call returned {said!r}; None, a HookedCall or Refusal(reason=text) is expected")


def checked_verdict(one: NamedHook, said: Any) -> Verdict | None:
    if said is None:
        return None
    if not isinstance(said, Verdict):
        raise BadVerdictError(f"on_tokens returned {said!r}; None or a Verdict is expected")
    for name, value in (("hold", said.hold), ("keep", said.keep)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise BadVerdictError(f"{name}={value!r}: a number of tokens is expected")
    if said.stop is not None and not isinstance(said.stop, str):
        raise BadVerdictError(f"stop={said.stop!r}: a text is expected")
    tokens = [*said.force, *said.ban, *(said.allow or ())]
    if not all(type(token) is int for token in tokens):
        raise BadVerdictError("force, ban, allow: token ids are expected")
    if (tokens or said.allow is not None) and not one.hook.lockstep:
        raise BadVerdictError("it forces or masks tokens, which only a hook with lockstep = True may do")
    return said


def strictest(verdicts: Sequence[Verdict]) -> Verdict:
    """A stop before all else, and of several the one that shows least; what the first forces; all that any excludes."""
    if len(verdicts) <= 1:
        return verdicts[0] if verdicts else _NOTHING_SAID
    hold = max(one.hold for one in verdicts)
    stops = [one for one in verdicts if one.stop is not None]
    if stops:
        keeps = [one.keep for one in stops if one.keep is not None]
        return Verdict(hold=hold, stop=stops[0].stop, keep=min(keeps, default=None))
    allows = [set(one.allow) for one in verdicts if one.allow is not None]
    return Verdict(
        hold=hold,
        force=next((one.force for one in verdicts if one.force), ()),
        ban=sorted({token for one in verdicts for token in one.ban}),
        allow=sorted(set.intersection(*allows)) if allows else None,
    )
