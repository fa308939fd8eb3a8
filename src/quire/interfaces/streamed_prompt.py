"""A prompt that is computed while it arrives (streaming prefill, 4.4.4).

Owns the way of one prompt from an asynchronous iterator of pieces to the core, until it is whole. Nothing is generated
before; then the outputs are those of the same prompt sent at once, token for token. Tokens of a text are sent as soon
as they are settled (renderer/growing_text.py). If the whole text says otherwise in the end, the request is sent again
with the right tokens; the prefix cache still has what they have in common.

Called by AsyncLLM. Whoever goes away takes the request with him: the iterator is closed and the core told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from quire.engine_client import AsyncEngineClient
from quire.errors import RequestError
from quire.interfaces.prompts import is_token_ids
from quire.interfaces.received_request import AbortedRequest, HeldRequest, ReceivedRequest
from quire.interfaces.requests import RequestMaker
from quire.interfaces.text_threads import LONG_TEXT, TextThreads
from quire.messages import EngineRequest

if TYPE_CHECKING:
    from quire.renderer import GrowingText

# a part of the text, token ids, or one token id; a prompt is of one kind
Piece: TypeAlias = "str | Sequence[int] | int"
# An iterator that never waits gives way after so many pieces, and waits if so many more were not looked at.
_PIECES_AT_ONCE = 64
_MOST_WAITING = 1024


class _Source(Protocol):
    """A prompt in the making: GrowingText, or _GrowingTokens."""

    token_ids: list[int]
    num_characters: int

    @property
    def text(self) -> str | None: ...
    def push(self, piece: Any, /) -> list[int]: ...
    def finish(self) -> list[int]: ...
    def whole(self) -> list[int]: ...


class _GrowingTokens:
    """Tokens are settled as they come, but for the last one: it goes with the end, which asks for its logits."""

    text = None
    num_characters = 0

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._last: list[int] = []

    def push(self, piece: list[int], /) -> list[int]:
        come = [*self._last, *piece]
        settled = come[:-1]
        self._last = come[-1:]
        self.token_ids += settled
        return settled

    def finish(self) -> list[int]:
        return []

    def whole(self) -> list[int]:
        return [*self.token_ids, *self._last]


class PromptFeed:
    """Carries the pieces of one prompt to the core."""

    def __init__(
        self,
        client: AsyncEngineClient,
        maker: RequestMaker,
        threads: TextThreads,
        open_text: Callable[[], GrowingText],
    ) -> None:
        self._client = client
        self._maker = maker
        self._threads = threads
        self._open_text = open_text
        self._news = asyncio.Event()
        self._pieces: asyncio.Queue[Any] = asyncio.Queue(_MOST_WAITING)
        self._source: _Source | None = None
        self._held: HeldRequest | None = None
        self._num_checked = 0
        self._num_sent = 0
        self._is_aborted = False

    def abort(self) -> None:
        """The prompt ends here, with finish reason "abort"."""
        self._is_aborted = True
        self._news.set()

    async def run(self, pieces: AsyncIterable[Any], request: EngineRequest, *, shows_logprobs: bool) -> ReceivedRequest:
        """Returns when the prompt is whole. `request` is what it belongs to, without a prompt."""
        reader = asyncio.ensure_future(self._read(pieces))
        reader.add_done_callback(lambda _: self._news.set())
        try:
            is_whole = await self._send_all(reader, request)
            if self._is_aborted and self._held is not None:
                await self._held.aclose()
        except BaseException:
            if self._held is not None:
                await self._held.aclose()
            raise
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        running: HeldRequest | AbortedRequest = AbortedRequest(request.sampling.n)
        if self._held is not None and not self._is_aborted:
            running = self._held
            request = msgspec.structs.replace(request, request_id=self._held.request_id)
        token_ids = self._source.token_ids if self._source is not None else []
        return ReceivedRequest(
            msgspec.structs.replace(request, prompt_token_ids=token_ids, is_final=True),
            self._source.text if self._source is not None else None,
            shows_logprobs,
            is_whole=is_whole,
            running=[running],
        )

    async def _read(self, pieces: AsyncIterable[Any]) -> None:
        iterator = aiter(pieces)
        count = 0
        try:
            async for piece in iterator:
                await self._pieces.put(piece)
                self._news.set()
                count += 1
                if count % _PIECES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    async def _send_all(self, reader: asyncio.Future[None], request: EngineRequest) -> bool:
        """False if it ended before it was whole."""
        while not reader.done() or not self._pieces.empty():
            await self._news.wait()
            self._news.clear()
            if reader.done():
                reader.result()  # what the iterator raised goes first
            if self._has_ended():
                return False
            await self._take_pieces(request)
            if not reader.done():  # else all that is left goes together
                self._send_settled(request)
        reader.result()
        await self._send_rest(request)
        return not self._has_ended()

    def _has_ended(self) -> bool:
        if self._held is not None:
            self._held.look()
        return self._is_aborted or (self._held is not None and self._held.has_ended)

    async def _take_pieces(self, request: EngineRequest) -> None:
        """Pieces that came together are looked at together."""
        pieces: list[Any] = []
        while not self._pieces.empty():
            pieces.append(_checked(self._pieces.get_nowait()))
        if not pieces:
            return
        is_text = isinstance(pieces[0], str)
        source = self._source = self._source or self._opened(is_text)
        if any(isinstance(piece, str) == isinstance(source, _GrowingTokens) for piece in pieces):
            raise RequestError("prompt: some pieces are texts, others token ids. Give one kind.", param="prompt")
        if not is_text:
            token_ids = [token for piece in pieces for token in piece]
            source.push(self._maker.checked_piece(token_ids, request.sampling, len(source.token_ids)))
            return
        text = "".join(pieces)
        if len(text) > LONG_TEXT:
            await self._threads.call(source.push, text)
        else:
            source.push(text)

    def _opened(self, is_text: bool) -> _Source:
        return self._open_text() if is_text else _GrowingTokens()

    def _send_settled(self, request: EngineRequest, *, is_final: bool = False) -> None:
        """What was not sent yet."""
        if self._source is None:
            return
        num_before = self._num_sent if is_final else self._num_checked
        token_ids = self._maker.checked_piece(self._source.token_ids[num_before:], request.sampling, num_before)
        self._num_checked = num_before + len(token_ids)
        # The log-probability of a prompt token is found with the token before it: here all wait for the last one.
        is_early = request.sampling.prompt_logprobs is None
        if not is_final and not (token_ids and is_early):
            return
        self._num_sent += len(token_ids)
        if self._held is None:
            self._start(msgspec.structs.replace(request, prompt_token_ids=token_ids, is_final=is_final))
        else:
            self._client.extend(self._held.request_id, token_ids, is_final=is_final)

    def _start(self, request: EngineRequest) -> None:
        self._held = HeldRequest(self._client, request, self._news.set)

    async def _send_rest(self, request: EngineRequest) -> None:
        source = self._source
        if source is None:
            raise RequestError("prompt: the iterator ended without a piece. Give at least one token.", param="prompt")
        is_long = source.num_characters > LONG_TEXT
        is_ahead = is_long and self._held is not None
        if is_ahead:
            # The engine may begin while the text is looked at as a whole.
            source.finish()
            self._send_settled(request, is_final=True)
        whole = await self._threads.call(source.whole) if is_long else source.whole()
        if not whole:
            raise RequestError("prompt: it has no tokens. Give at least one, for example a space.", param="prompt")
        num_sent = self._num_sent
        is_right = whole[:num_sent] == source.token_ids[:num_sent] and not (is_ahead and len(whole) > num_sent)
        source.token_ids = whole
        if not is_right:
            await self._send_again(whole, request)
        elif not is_ahead:
            self._send_settled(request, is_final=True)

    async def _send_again(self, whole: list[int], request: EngineRequest) -> None:
        assert self._held is not None
        again = self._maker.resent(request, whole)
        await self._held.aclose()
        self._start(again)


def _checked(piece: Any) -> str | list[int]:
    """A text, or a list of token ids, which are checked when they are sent."""
    if isinstance(piece, str):
        return piece
    if isinstance(piece, Integral) and not isinstance(piece, bool):
        return [int(piece)]
    piece = piece.tolist() if hasattr(piece, "tolist") else piece
    if is_token_ids(piece) or (isinstance(piece, list | tuple) and not piece):
        return list(piece)
    raise RequestError(
        f"prompt: a piece of type {type(piece).__name__}: must be a text, a list of token ids or one token id.",
        param="prompt",
    )
