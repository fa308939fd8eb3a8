"""A hook in a process of its own: it may hang, crash or hold the interpreter in the place of the server.

The process reads from its standard input which hook it is, then one question after the other, each as MessagePack
behind its length, and answers each with what the hook says or raises. What belongs to a sequence stays over there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec

from quire.asked_process import AskedProcess, NotStartedError, frames, read_frame, write_frame
from quire.errors import one_line
from quire.hooks import (
    METHODS,
    FinishedSequence,
    Hook,
    HookedCall,
    HookedRequest,
    Refusal,
    SequenceTokens,
    Verdict,
    has,
)
from quire.interfaces.hooks.first_part import FirstPart
from quire.sampling_params import SamplingParams

_PROGRAM = "quire.interfaces.hooks.hook_process"
# of sequences whose ends were not heard of
_MOST_STATES = 4096
_SEEN: dict[str, type[Any]] = {
    "on_tokens": SequenceTokens,
    "on_tool_call": HookedCall,
    "on_finish": FinishedSequence,
}
_NO_TOKENIZER = "a hook in a process of its own has no tokenizer. Leave hook_process out."
# what does not travel
_LEFT_OUT = ("request", "state")


class _Question(msgspec.Struct, array_like=True):
    """A method, and what it is to look at. The first one asks nothing."""

    method: str = ""
    request_id: int = 0
    prompt_token_ids: list[int] = []
    prompt: str = ""
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    tenant: str = ""
    seen: dict[str, Any] = {}


class _Answer(msgspec.Struct, array_like=True):
    """`kind` is Verdict, Refusal, HookedCall, "" for nothing, or "error"."""

    kind: str = ""
    said: dict[str, Any] = {}


class HookProcessError(Exception):
    """What the hook raised over there, or why there is no answer."""


# ---- here ------------------------------------------------------------------------------------------------------------


class HookProcess(Hook):
    """Asks it, one question at a time. A call that takes too long ends the process, and the next starts another."""

    def __init__(self, name: str, hook: Hook, seconds: float) -> None:
        """`hook`: the same one, made here, which says how it is to be asked."""
        self.stride = hook.stride
        self.lockstep = hook.lockstep
        self.ahead = hook.ahead
        self.timeout = hook.timeout
        self.on_failure = hook.on_failure
        self._seconds = hook.timeout or seconds
        self._lock = threading.Lock()
        self._process = AskedProcess(_PROGRAM, lambda: [name.encode(), msgspec.msgpack.encode(_Question())])
        for method in METHODS:
            # the end of a sequence is the end of what is kept for it
            if has(hook, method) or (method == "on_finish" and has(hook, "on_tokens")):
                setattr(self, method, partial(self._ask, method))

    def close(self) -> None:
        self._process.close()

    def _ask(self, method: str, subject: Any) -> Any:
        request: HookedRequest = subject if method == "on_admit" else subject.request
        question = _Question(
            method,
            request.request_id,
            list(request.prompt_token_ids),
            request.prompt,
            request.sampling,
            request.tenant,
            {} if subject is request else _plain(subject),
        )
        data = msgspec.msgpack.encode(question)
        # whoever asked would have given up by then, and each such question takes as long again
        if not self._lock.acquire(timeout=self._seconds):
            raise HookProcessError(f"others asked it for {self._seconds:g} s")
        try:
            answer = msgspec.msgpack.decode(self._process.ask([data], self._seconds), type=_Answer)
        except TimeoutError:
            raise HookProcessError(f"no answer in {self._seconds:g} s; its process was ended") from None
        except (OSError, EOFError, NotStartedError) as error:
            raise HookProcessError(f"its process has ended: {one_line(error)}") from None
        finally:
            self._lock.release()
        return self._said(answer, request)

    def _said(self, answer: _Answer, request: HookedRequest) -> Any:
        match answer.kind:
            case "":
                return None
            case "Verdict":
                return Verdict(**answer.said)
            case "Refusal":
                return Refusal(**answer.said)
            case "HookedCall":
                return HookedCall(request=request, **answer.said)
        raise HookProcessError(answer.said["error"])


def _plain(subject: Any) -> dict[str, Any]:
    """Its fields, as far as they travel."""
    found = {one.name: getattr(subject, one.name) for one in fields(subject) if one.name not in _LEFT_OUT}
    return {name: value[:] if isinstance(value, FirstPart) else value for name, value in found.items()}


# ---- over there ------------------------------------------------------------------------------------------------------


class _Asked:
    """The hook, and what it keeps for sequences."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._states: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def answer(self, question: _Question) -> _Answer:
        if not question.method:
            return _Answer()
        request = HookedRequest(
            request_id=question.request_id,
            prompt_token_ids=question.prompt_token_ids,
            sampling=question.sampling,
            tenant=question.tenant,
            decode=partial(_text_of, question),
            encode=_no_encoding,
        )
        if question.method == "on_admit":
            return _said(self._hook.on_admit(request))
        seen = {"request": request, **question.seen}
        key = (question.request_id, question.seen["index"])
        if question.method == "on_tokens":
            seen["state"] = self._state_of(key)
        elif question.method == "on_finish":
            self._states.pop(key, None)
        return _said(getattr(self._hook, question.method)(_SEEN[question.method](**seen)))

    def _state_of(self, key: tuple[int, int]) -> dict[str, Any]:
        state = self._states.setdefault(key, {})
        while len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return state


def _text_of(question: _Question, token_ids: Sequence[int]) -> str:
    if token_ids is not question.prompt_token_ids:
        raise NotImplementedError(f"decode: {_NO_TOKENIZER}")
    return question.prompt


def _no_encoding(text: str) -> list[int]:
    raise NotImplementedError(f"encode: {_NO_TOKENIZER}")


def _said(said: Any) -> _Answer:
    if said is None:
        return _Answer()
    if not isinstance(said, Verdict | Refusal | HookedCall):
        raise TypeError(f"it returned {said!r}")
    return _Answer(type(said).__name__, _plain(said))


def main() -> None:
    from quire.interfaces.hooks.loading import made_hook

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # what a hook prints must not stand among the answers
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    asked = _Asked(made_hook(read_frame(source).decode())[1])
    decoder = msgspec.msgpack.Decoder(_Question)
    for data in frames(source):
        try:
            answer = msgspec.msgpack.encode(asked.answer(decoder.decode(data)))
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            answer = msgspec.msgpack.encode(_Answer("error", {"error": reason}))
        write_frame(sink, answer)
