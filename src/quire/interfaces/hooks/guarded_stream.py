"""One request whose tokens nobody sees before the hooks have: as a stream between the client's mailbox and its reader.

Everything that shows an answer is made of what comes out here: texts, events of every dialect, log-probabilities,
numbers of tokens. So what is held has left no trace anywhere else, wherever its text was cut into tokens. Owns what is
held. Belongs to the event loop of its client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from quire.engine_client import RequestStream, TokenDelta
from quire.engine_client.mailbox import nobody
from quire.errors import EngineDeadError, QuireError
from quire.hooks import FinishedSequence, HookedRequest, SequenceTokens, Verdict
from quire.interfaces.hooks.first_part import FirstPart
from quire.interfaces.hooks.judging import Cancel, Hooks
from quire.messages import EngineRequest, PermitTokens, TokenLogprobs, TokenMask
from quire.renderer import Renderer, TextStream
from quire.sampling_params import SamplingParams

logger = logging.getLogger("quire.hooks")
STOPPED = "content_filter"
# Sequences of one request that hooks look at at once: others want to be looked at, too.
_MOST_LOOKS = 8


class Sender(Protocol):
    """As much of a client as it needs."""

    def open_now(self, request: EngineRequest) -> RequestStream:
        """Sends it."""

    def permit(self, permit: PermitTokens) -> None: ...

    def drop(self, request_id: int, index: int) -> None:
        """The core ends one sequence."""

    def closed(self, request_id: int) -> None:
        """Nobody reads it any more."""


@dataclass(slots=True)
class _Sequence:
    """One sequence: its tokens, of which the first `num_shown` have gone on."""

    index: int
    stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_characters: int = 0
    # characters that each token has begun or ended, with those before it
    lengths: list[int] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    num_shown: int = 0
    num_judged: int = 0
    num_permitted: int = 0
    cancel: Cancel | None = None
    # what came with its end
    last: TokenDelta | None = None
    is_over: bool = False

    def take(self, delta: TokenDelta) -> None:
        for token in delta.token_ids:
            self._read(token)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.is_finished:
            self.last = delta
            if self.stream is not None:
                self.texts.append(self.stream.push([], is_last=True).text)

    def _read(self, token: int) -> None:
        is_open = False
        if self.stream is not None:
            text = self.stream.push([token], is_last=False).text
            self.texts.append(text)
            self.num_characters += len(text)
            is_open = self.stream.is_open
        self.lengths.append(self.num_characters + is_open)

    def text(self) -> str:
        if len(self.texts) > 1:
            self.texts = ["".join(self.texts)]
        return self.texts[0] if self.texts else ""

    def shown(self, until: int) -> TokenDelta:
        """What goes on now."""
        delta = TokenDelta(self.index, self.token_ids[self.num_shown : until])
        if self.logprobs:
            delta.logprobs = self.logprobs[self.num_shown : until]
        self.num_shown = until
        return delta


class GuardedStream:
    """Tokens as hooks let them pass."""

    def __init__(
        self, request: EngineRequest, hooks: Hooks, renderer: Renderer, sender: Sender, *, hears_ends_only: bool
    ) -> None:
        self.request_id = request.request_id
        self._request = request
        self._hooks = hooks
        self._sender = sender
        self._hears_ends_only = hears_ends_only
        tenant = request.tenant.name if request.tenant is not None else ""
        self._seen = hooked_request(request.request_id, request.prompt_token_ids, request.sampling, tenant, renderer)
        self._box: RequestStream | None = None
        self._sequences = [
            _Sequence(index, _text_of(request, renderer), num_permitted=request.permitted or 0)
            for index in range(request.sampling.n)
        ]
        for one in self._sequences:
            one.states = [{} for _ in hooks.watching]
        self._pending: dict[int, TokenDelta] = {}
        self._num_open = request.sampling.n
        self._error: QuireError | None = None
        self._reader: Callable[[], None] = nobody
        self._cancel_admission: Cancel | None = None
        self._is_closed = False
        # sequences that are looked at now, and those that wait for it
        self._num_looks = 0
        self._waiting: dict[int, _Sequence] = {}

    def begin(self) -> None:
        """It is sent, or asked about first."""
        if self._hooks.admitting and not self._request.is_final:
            return  # hooks wait for the rest of the prompt
        if self._hooks.admitting:
            self._cancel_admission = self._hooks.admit(self._seen, self._admitted)
        else:
            self._send()

    # ------------------------------------------------------------------------------------------ for its reader

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader

    @property
    def has_news(self) -> bool:
        return bool(self._pending) or self._error is not None

    @property
    def has_ended(self) -> bool:
        return not self._num_open or self._error is not None

    @property
    def is_done(self) -> bool:
        return not self._num_open and not self._pending

    def take(self) -> Sequence[TokenDelta]:
        if self._pending:
            pending = self._pending
            self._pending = {}
            return list(pending.values())
        if self._error is not None and self._num_open:
            raise self._error
        return ()

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._cancel_admission is not None:
            self._cancel_admission()
        self._waiting.clear()
        for one in self._sequences:
            self._leave(one, "abort", None)
        self._pending = {}
        self._reader = nobody
        if self._box is not None:
            self._box.tell(nobody)
            self._box.close()
        self._sender.closed(self.request_id)

    # ------------------------------------------------------------------------------------------ for its client

    def extend(self, token_ids: list[int], *, is_final: bool) -> bool:
        """More of its prompt. Whether it stays here: where it is to be admitted, hooks see the whole before the engine
        has any of it."""
        prompt = [*self._seen.prompt_token_ids, *token_ids]
        self._seen = replace(self._seen, prompt_token_ids=tuple(prompt))
        if not self._hooks.admitting:
            return False
        if self._num_open and not self._request.is_final:
            self._request = msgspec.structs.replace(self._request, prompt_token_ids=prompt, is_final=is_final)
            if is_final:
                self.begin()
        return True

    def abort_unsent(self) -> bool:
        """Ends it if it was not sent yet: nobody else would say that it has ended."""
        if self._box is not None:
            return False
        if self._cancel_admission is not None:
            self._cancel_admission()
        self._end_all("abort")
        return True

    def drop(self, index: int) -> None:
        """Its reader has ended a sequence, and hears no more of it."""
        sequence = self._sequences[index]
        if not sequence.is_over:
            self._leave(sequence, "stop", None)
        self._pending.pop(index, None)

    # ------------------------------------------------------------------------------------------ admission

    def _admitted(self, reason: str | None) -> None:
        self._cancel_admission = None
        if self._is_closed or not self._num_open:
            return
        if reason is not None:
            self._end_all("error", reason)
            return
        self._send()

    def _send(self) -> None:
        try:
            self._box = self._sender.open_now(self._request)
        except QuireError as error:
            self._error = error
            self._reader()
            return
        self._box.tell(self._hear)
        if self._box.has_news:
            self._hear()

    def _end_all(self, finish_reason: str, error: str | None = None) -> None:
        self._waiting.clear()
        for one in self._sequences:
            if not one.is_over:
                is_refused = error is not None
                self._show(TokenDelta(one.index, finish_reason=finish_reason, error=error, is_refused=is_refused))
                self._leave(one, finish_reason, error)
        self._tell()

    # ------------------------------------------------------------------------------------------ tokens

    def _hear(self) -> None:
        assert self._box is not None
        try:
            while self._box.has_news and self._error is None:
                for delta in self._box.take():
                    self._take(delta)
                if self._box.is_done:
                    break
        except EngineDeadError as error:
            self._error = error
        except Exception as error:
            logger.exception("request %d failed where hooks look at it", self.request_id)
            self._box.close()
            self._end_all("error", f"its tokens could not be shown to the hooks ({type(error).__name__})")
        self._tell()

    def _take(self, delta: TokenDelta) -> None:
        sequence = self._sequences[delta.index]
        if sequence.is_over:
            return
        of_prompt = (delta.num_cached_tokens, delta.prompt_logprobs, delta.share_of_others)
        if any(fact is not None for fact in of_prompt):
            # its sender knows it
            first = TokenDelta(delta.index, prompt_logprobs=delta.prompt_logprobs)
            first.num_cached_tokens = delta.num_cached_tokens
            first.first_miss = delta.first_miss
            first.share_of_others = delta.share_of_others
            self._show(first)
        sequence.take(delta)
        if delta.finish_reason in ("error", "abort"):
            # what was not judged stays here
            end = _end_of(delta)
            self._show(end)
            self._leave(sequence, str(delta.finish_reason), delta.stop_reason)
            return
        self._consider(sequence)

    def _consider(self, sequence: _Sequence) -> None:
        """Asks, if there is enough to look at and nobody is looking."""
        if sequence.cancel is not None or sequence.is_over:
            return
        num_new = len(sequence.token_ids) - sequence.num_judged
        if sequence.last is None and num_new < self._hooks.stride:
            return
        if not self._hooks.watching:
            self._judged(sequence, len(sequence.token_ids), sequence.last is not None, Verdict())
            return
        if self._num_looks >= _MOST_LOOKS:
            self._waiting[sequence.index] = sequence
            return
        self._num_looks += 1
        text = sequence.text()
        token_ids = FirstPart(sequence.token_ids)
        lengths = FirstPart(sequence.lengths)
        is_last = sequence.last is not None
        each = [
            SequenceTokens(
                request=self._seen,
                index=sequence.index,
                token_ids=token_ids,
                num_shown=sequence.num_shown,
                text=text,
                lengths=lengths,
                is_last=is_last,
                state=state,
            )
            for state in sequence.states
        ]
        sequence.cancel = self._hooks.judge(each, partial(self._judged, sequence, len(token_ids), is_last))

    def _judged(self, sequence: _Sequence, num_tokens: int, is_last: bool, verdict: Verdict) -> None:
        """`num_tokens`: those that were looked at."""
        if sequence.cancel is not None:
            self._end_look(sequence)
        if sequence.is_over:
            return
        sequence.num_judged = num_tokens
        if verdict.stop is not None:
            self._stop(sequence, num_tokens, verdict)
        else:
            hold = 0 if is_last else verdict.hold
            until = max(sequence.num_shown, num_tokens - hold)
            if until > sequence.num_shown:
                self._show(sequence.shown(until))
            if is_last:
                assert sequence.last is not None
                self._show(_end_of(sequence.last))
                self._leave(sequence, str(sequence.last.finish_reason), sequence.last.stop_reason)
            else:
                self._permit(sequence, verdict)
                self._consider(sequence)
        self._tell()

    def _end_look(self, sequence: _Sequence) -> None:
        sequence.cancel = None
        self._num_looks -= 1
        while self._waiting and self._num_looks < _MOST_LOOKS:
            self._consider(self._waiting.pop(next(iter(self._waiting))))

    def _stop(self, sequence: _Sequence, num_tokens: int, verdict: Verdict) -> None:
        keep = num_tokens - verdict.hold if verdict.keep is None else min(verdict.keep, num_tokens)
        end = sequence.shown(max(sequence.num_shown, keep))
        end.finish_reason = STOPPED
        end.stop_reason = verdict.stop
        self._show(end)
        if sequence.last is None:
            self._sender.drop(self.request_id, sequence.index)
        self._leave(sequence, STOPPED, verdict.stop)

    def _permit(self, sequence: _Sequence, verdict: Verdict) -> None:
        """The core goes on, which may wait for it."""
        if self._request.permitted is None or sequence.last is not None:
            return
        num_tokens = sequence.num_judged + len(verdict.force) + self._hooks.ahead
        is_enough = num_tokens - sequence.num_permitted >= max(1, self._hooks.ahead // 2)
        if not (is_enough or self._hooks.is_lockstep):
            return
        sequence.num_permitted = num_tokens
        is_masked = bool(verdict.ban) or verdict.allow is not None
        mask = TokenMask(banned=list(verdict.ban), allowed=None if verdict.allow is None else list(verdict.allow))
        self._sender.permit(
            PermitTokens(
                request_id=self.request_id,
                index=sequence.index,
                num_tokens=num_tokens,
                token_ids=list(verdict.force),
                mask=mask if is_masked else None,
            )
        )

    # ------------------------------------------------------------------------------------------ out

    def _show(self, delta: TokenDelta) -> None:
        pending = self._pending.get(delta.index)
        if pending is None:
            self._pending[delta.index] = delta
        else:
            pending.merge(delta)

    def _tell(self) -> None:
        if self.has_news and (self.has_ended or not self._hears_ends_only):
            self._reader()

    def _leave(self, sequence: _Sequence, finish_reason: str, stop_reason: int | str | None) -> None:
        """It has ended, for whatever reason; hooks are told, once."""
        if sequence.is_over:
            return
        sequence.is_over = True
        self._num_open -= 1
        self._waiting.pop(sequence.index, None)
        if sequence.cancel is not None:
            sequence.cancel()
            self._end_look(sequence)
        self._hooks.finish(
            FinishedSequence(
                request=self._seen,
                index=sequence.index,
                token_ids=tuple(sequence.token_ids[: sequence.num_shown]),
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
        )


def _end_of(delta: TokenDelta) -> TokenDelta:
    """The end without what came before it."""
    end = TokenDelta(delta.index)
    end.merge(delta)
    end.token_ids = []
    end.logprobs = None
    end.prompt_logprobs = None
    end.num_cached_tokens = None
    end.share_of_others = None
    return end


def hooked_request(
    request_id: int, prompt: Sequence[int], sampling: SamplingParams, tenant: str, renderer: Renderer
) -> HookedRequest:
    """A request as hooks see it: nothing that they do to it reaches the engine."""
    return HookedRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=sampling.replace(),
        tenant=tenant,
        decode=lambda token_ids: renderer.decode(list(token_ids), skip_special_tokens=False),
        encode=lambda text: renderer.render_continuation(text, max_tokens=len(text) + 1),
    )


def _text_of(request: EngineRequest, renderer: Renderer) -> TextStream | None:
    """The text without special tokens, also where the request shows them or a parser takes them out later: else one of
    them could stand in the middle of what a hook looks for. Stop strings are looked for in what is shown."""
    if not renderer.has_tokenizer:
        return None
    return renderer.open_stream(
        request.prompt_token_ids, SamplingParams(stop_token_ids=request.sampling.stop_token_ids)
    )
