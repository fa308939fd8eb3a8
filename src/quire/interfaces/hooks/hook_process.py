"""A hook in a process of its own: it may hang, crash or hold the interpreter in the place of the server.

The process reads from its standard input which hook it is, then one question after the other, each as MessagePack
behind its length, and answers each with what the hook says or raises. What belongs to a sequence stays over there: its
state, its request and its tokens so far, of which a question has only the new ones. What the process does not have any
more, or not yet after a start, it is told once more.
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
_MOST_SEQUENCES = 4096
# of prompts that are remembered over there
_MOST_PROMPT_TOKENS = 1 << 20
_SEEN: dict[str, type[Any]] = {
    "on_tokens": SequenceTokens,
    "on_tool_call": HookedCall,
    "on_finish": FinishedSequence,
}
_NO_TOKENIZER = "a hook in a process of its own has no tokenizer. Leave hook_process out."
# what does not travel, or only as far as it is new
_LEFT_OUT = ("request", "state")
_GROWING = ("token_ids", "lengths", "text")
_UNKNOWN = "unknown"
_Key = tuple[int, int]


class _Request(msgspec.Struct, array_like=True):
    """HookedRequest, as it travels."""

    prompt_token_ids: list[int]
    prompt: str
    sampling: SamplingParams
    tenant: str


class _Growth(msgspec.Struct, array_like=True):
    """What a sequence has behind so many tokens and characters."""

    num_tokens: int
    token_ids: list[int]
    lengths: list[int]
    num_characters: int
    text: str


class _Question(msgspec.Struct, array_like=True):
    """A method, and what it is to look at. The first one asks nothing. No `request`: it was told before."""

    method: str = ""
    request_id: int = 0
    request: _Request | None = None
    seen: dict[str, Any] = {}
    growth: _Growth | None = None


class _Answer(msgspec.Struct, array_like=True):
    """`kind` is Verdict, Refusal, HookedCall, "" for nothing, "error", or "unknown": something must be told again."""

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
        self._told = _Told()
        self._process = AskedProcess(_PROGRAM, lambda: [name.encode(), msgspec.msgpack.encode(_Question())])
        for method in METHODS:
            # the end of a sequence is the end of what is kept for it
            if has(hook, method) or (method == "on_finish" and has(hook, "on_tokens")):
                setattr(self, method, partial(self._ask, method))

    def close(self) -> None:
        self._process.close()

    def _ask(self, method: str, subject: Any) -> Any:
        request: HookedRequest = subject if method == "on_admit" else subject.request
        # whoever asked would have given up by then, and each such question takes as long again
        if not self._lock.acquire(timeout=self._seconds):
            raise HookProcessError(f"others asked it for {self._seconds:g} s")
        try:
            answer = self._answer(self._told.question(method, request, subject))
            if answer.kind == _UNKNOWN:
                self._told = _Told()
                answer = self._answer(self._told.question(method, request, subject))
        except TimeoutError:
            raise HookProcessError(f"no answer in {self._seconds:g} s; its process was ended") from None
        except (OSError, EOFError, NotStartedError) as error:
            raise HookProcessError(f"its process has ended: {one_line(error)}") from None
        finally:
            self._lock.release()
        return self._said(answer, request)

    def _answer(self, question: _Question) -> _Answer:
        data = msgspec.msgpack.encode(question)
        return msgspec.msgpack.decode(self._process.ask([data], self._seconds), type=_Answer)

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


class _Told:
    """What the process was told, as far as it matters. It may have forgotten, and says so."""

    def __init__(self) -> None:
        # of each sequence: how many tokens, and which text
        self._sequences: OrderedDict[_Key, tuple[int, str]] = OrderedDict()
        self._requests: OrderedDict[int, None] = OrderedDict()

    def question(self, method: str, request: HookedRequest, subject: Any) -> _Question:
        number = request.request_id
        question = _Question(method, number, None if number in self._requests else _as_told(request))
        self._requests[number] = None
        if subject is not request:
            question.seen = _plain(subject, _GROWING if method == "on_tokens" else ())
        if method == "on_tokens":
            question.growth = self._growth((number, subject.index), subject)
        elif method == "on_finish":
            self._sequences.pop((number, subject.index), None)
            if not any(one == number for one, _ in self._sequences):
                self._requests.pop(number, None)
        for told in (self._sequences, self._requests):
            while len(told) > _MOST_SEQUENCES:
                told.popitem(last=False)
        return question

    def _growth(self, key: _Key, tokens: SequenceTokens) -> _Growth:
        num_tokens, text = self._sequences.get(key, (0, ""))
        # the end of a text may still change: of a character that is not whole
        num_characters = len(text) if tokens.text.startswith(text) else 0
        self._sequences[key] = (len(tokens.token_ids), tokens.text)
        return _Growth(
            num_tokens,
            list(tokens.token_ids[num_tokens:]),
            list(tokens.lengths[num_tokens:]),
            num_characters,
            tokens.text[num_characters:],
        )


def _as_told(request: HookedRequest) -> _Request:
    sampling = msgspec.structs.replace(request.sampling, logits_processors=None)
    return _Request(list(request.prompt_token_ids), request.prompt, sampling, request.tenant)


def _plain(subject: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Its fields, as far as they travel."""
    names = [one.name for one in fields(subject) if one.name not in (*_LEFT_OUT, *left_out)]
    found = {name: getattr(subject, name) for name in names}
    return {name: value[:] if isinstance(value, FirstPart) else value for name, value in found.items()}


# ---- over there ------------------------------------------------------------------------------------------------------


class _Asked:
    """The hook, and what it keeps for sequences."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._sequences: OrderedDict[_Key, _Sequence] = OrderedDict()
        self._requests: OrderedDict[int, HookedRequest] = OrderedDict()
        self._num_prompt_tokens = 0

    def answer(self, question: _Question) -> _Answer:
        if not question.method:
            return _Answer()
        number = question.request_id
        if question.request is not None:
            self._remember(number, question.request)
        request = self._requests.get(number)
        if request is None:
            return _Answer(_UNKNOWN)
        if question.method == "on_admit":
            said = _said(self._hook.on_admit(request))
            self._forget_beyond(number)
            return said
        seen = {"request": request, **question.seen}
        key = (number, question.seen["index"])
        if question.growth is not None:
            sequence = self._sequences.setdefault(key, _Sequence())
            if not sequence.grow(question.growth):
                return _Answer(_UNKNOWN)
            seen |= sequence.seen()
        elif question.method == "on_finish":
            self._end(key)
        self._forget_beyond(number)
        return _said(getattr(self._hook, question.method)(_SEEN[question.method](**seen)))

    def _remember(self, number: int, told: _Request) -> None:
        self._forget(number)
        self._num_prompt_tokens += len(told.prompt_token_ids)
        self._requests[number] = HookedRequest(
            request_id=number,
            prompt_token_ids=told.prompt_token_ids,
            sampling=told.sampling,
            tenant=told.tenant,
            decode=partial(_text_of, told),
            encode=_no_encoding,
        )

    def _end(self, key: _Key) -> None:
        self._sequences.pop(key, None)
        if not any(number == key[0] for number, _ in self._sequences):
            self._forget(key[0])

    def _forget(self, number: int) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            self._num_prompt_tokens -= len(request.prompt_token_ids)

    def _forget_beyond(self, number: int) -> None:
        """The oldest, where there are too many; not the one that is looked at."""
        while len(self._sequences) > _MOST_SEQUENCES:
            self._sequences.popitem(last=False)
        is_much = self._num_prompt_tokens > _MOST_PROMPT_TOKENS or len(self._requests) > _MOST_SEQUENCES
        while is_much and len(self._requests) > 1:
            oldest = next(one for one in self._requests if one != number)
            self._forget(oldest)
            is_much = self._num_prompt_tokens > _MOST_PROMPT_TOKENS or len(self._requests) > _MOST_SEQUENCES


class _Sequence:
    """The tokens of one so far, and what the hook keeps for it."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._token_ids: list[int] = []
        self._lengths: list[int] = []
        self._text = ""

    def grow(self, growth: _Growth) -> bool:
        """False: something lies between what is here and what came."""
        if growth.num_tokens > len(self._token_ids) or growth.num_characters > len(self._text):
            return False
        # told once more, after an answer that nobody waited for
        if growth.num_tokens < len(self._token_ids):
            self._token_ids = self._token_ids[: growth.num_tokens]
            self._lengths = self._lengths[: growth.num_tokens]
        self._token_ids += growth.token_ids
        self._lengths += growth.lengths
        self._text = self._text[: growth.num_characters] + growth.text
        return True

    def seen(self) -> dict[str, Any]:
        token_ids, lengths = FirstPart(self._token_ids), FirstPart(self._lengths)
        return {"token_ids": token_ids, "lengths": lengths, "text": self._text, "state": self._state}


def _text_of(told: _Request, token_ids: Sequence[int]) -> str:
    if token_ids is not told.prompt_token_ids:
        raise NotImplementedError(f"decode: {_NO_TOKENIZER}")
    return told.prompt


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
