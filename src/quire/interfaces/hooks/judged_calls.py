"""Answers whose calls of tools nobody sees before the hooks have.

From its first call on, an answer is kept until it has ended; then its calls are judged one after another, and what is
left of it goes on at once. Where a call was changed or refused, the tokens of that part are not told either: they and
their log-probabilities would say what the model had called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from quire.engine_client import Stream
from quire.engine_client.mailbox import nobody
from quire.hooks import HookedCall, HookedRequest, Refusal
from quire.interfaces.assembly import OutputDelta
from quire.interfaces.hooks.judging import Cancel, Hooks
from quire.renderer.output_parsing.answer import CallArguments, CallStart, Content, Piece


@dataclass(slots=True)
class _KeptAnswer:
    """One answer from its first call on."""

    index: int
    deltas: list[OutputDelta] = field(default_factory=list)
    # in their order; of a call, its start and its whole arguments
    pieces: list[Piece] = field(default_factory=list)
    num_judged: int = 0
    num_calls: int = 0
    is_changed: bool = False
    cancel: Cancel | None = None

    def take(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        for piece in delta.pieces or ():
            last = self.pieces[-1] if self.pieces else None
            if isinstance(piece, CallArguments) and isinstance(last, CallArguments):
                self.pieces[-1] = CallArguments(last.index, last.text + piece.text)
            else:
                self.pieces.append(piece)


class JudgedCalls:
    """What a generation brings, in its order for each answer."""

    def __init__(self, source: Stream[OutputDelta], hooks: Hooks, request_of: Callable[[int], HookedRequest]) -> None:
        """`request_of`: the request of an answer."""
        self._source = source
        self._hooks = hooks
        self._request_of = request_of
        self._kept: dict[int, _KeptAnswer] = {}
        self._news: list[OutputDelta] = []
        self._reader: Callable[[], None] = nobody

    def tell(self, reader: Callable[[], None]) -> None:
        self._reader = reader
        self._source.tell(reader)

    @property
    def has_news(self) -> bool:
        return bool(self._news) or self._source.has_news

    @property
    def is_done(self) -> bool:
        return self._source.is_done and not self._kept and not self._news

    def take(self) -> Sequence[OutputDelta]:
        for delta in self._source.take():
            self._take(delta)
        news = self._news
        self._news = []
        return news

    async def aclose(self) -> None:
        for kept in self._kept.values():
            if kept.cancel is not None:
                kept.cancel()
        self._reader = nobody
        await self._source.aclose()

    # ------------------------------------------------------------------------------------------ inside

    def _take(self, delta: OutputDelta) -> None:
        kept = self._kept.get(delta.index)
        if kept is None:
            if not any(isinstance(piece, CallStart) for piece in delta.pieces or ()):
                self._news.append(delta)
                return
            kept = self._kept[delta.index] = _KeptAnswer(delta.index)
        kept.take(delta)
        if delta.finish_reason is not None:
            self._judge_next(kept)

    def _judge_next(self, kept: _KeptAnswer) -> None:
        while kept.num_judged < len(kept.pieces):
            piece = kept.pieces[kept.num_judged]
            if isinstance(piece, CallStart):
                call = HookedCall(
                    request=self._request_of(kept.index),
                    index=kept.index,
                    name=piece.name,
                    arguments=_arguments_at(kept.pieces, kept.num_judged + 1),
                )
                kept.cancel = self._hooks.judge_call(call, partial(self._judged, kept, piece, call))
                return
            kept.num_judged += 1
        self._release(kept)

    def _judged(self, kept: _KeptAnswer, start: CallStart, call: HookedCall, said: HookedCall | Refusal) -> None:
        kept.cancel = None
        place = kept.num_judged
        end = place + 1 + bool(isinstance(_piece_at(kept.pieces, place + 1), CallArguments))
        if isinstance(said, Refusal):
            judged: list[Piece] = [Content(said.reason)] if said.reason else []
        else:
            judged = [CallStart(kept.num_calls, said.name, start.id), CallArguments(kept.num_calls, said.arguments)]
            kept.num_calls += 1
        is_same = not isinstance(said, Refusal) and (said.name, said.arguments) == (call.name, call.arguments)
        kept.is_changed = kept.is_changed or not is_same
        kept.pieces[place:end] = judged
        kept.num_judged += len(judged)
        self._judge_next(kept)
        if self._news:
            self._reader()

    def _release(self, kept: _KeptAnswer) -> None:
        del self._kept[kept.index]
        *earlier, last = kept.deltas
        last.text = "".join(delta.text for delta in kept.deltas)
        last.pieces = kept.pieces
        last.token_ids = [token for delta in kept.deltas for token in delta.token_ids]
        if last.logprobs is not None or any(delta.logprobs for delta in earlier):
            last.logprobs = [entry for delta in kept.deltas for entry in delta.logprobs or ()]
        last.prompt_logprobs = next((one.prompt_logprobs for one in kept.deltas if one.prompt_logprobs), None)
        last.num_cached_tokens = next(
            (one.num_cached_tokens for one in kept.deltas if one.num_cached_tokens is not None), None
        )
        last.share_of_others = next(
            (one.share_of_others for one in kept.deltas if one.share_of_others is not None), None
        )
        if kept.is_changed:
            last.text = ""
            last.token_ids = []
            last.logprobs = None
        if last.finish_reason == "tool_calls" and not kept.num_calls:
            last.finish_reason = "stop"
        self._news.append(last)


def _piece_at(pieces: Sequence[Piece], place: int) -> Piece | None:
    return pieces[place] if place < len(pieces) else None


def _arguments_at(pieces: Sequence[Piece], place: int) -> str:
    piece = _piece_at(pieces, place)
    return piece.text if isinstance(piece, CallArguments) else ""
