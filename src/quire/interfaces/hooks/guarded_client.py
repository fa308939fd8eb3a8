"""The engine client where hooks are: each request that makes text is guarded, before it is sent and until it has ended.

What hooks ask themselves, and what becomes a vector, goes straight on. A client without hooks is none of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from quire.engine_client import AsyncEngineClient, Link, RequestStream
from quire.errors import RequestError
from quire.interfaces.hooks.guarded_stream import GuardedStream
from quire.interfaces.hooks.judging import Hooks
from quire.interfaces.hooks.unhooked import is_unhooked
from quire.messages import EngineRequest, PermitTokens


def open_client(link: Link, hooks: Hooks) -> AsyncEngineClient:
    return GuardedClient(link, hooks) if hooks else AsyncEngineClient(link)


class GuardedClient(AsyncEngineClient):
    """Hands out guarded streams."""

    def __init__(self, link: Link, hooks: Hooks) -> None:
        super().__init__(link)
        self._hooks = hooks
        # until they are closed
        self._guarded: dict[int, GuardedStream] = {}

    @property
    def num_open(self) -> int:
        num_unsent = sum(not super(GuardedClient, self).is_open(number) for number in self._guarded)
        return super().num_open + num_unsent

    def is_open(self, request_id: int) -> bool:
        return request_id in self._guarded or super().is_open(request_id)

    def open_all(self, requests: Sequence[EngineRequest], at_end: Collection[int] = ()) -> Sequence[RequestStream]:
        if is_unhooked():
            return super().open_all(requests, at_end)
        for request in requests:
            self._check(request)
        streams: dict[int, RequestStream] = {}
        free = [request for request in requests if request.pooling]
        if free:
            streams = dict(zip([one.request_id for one in free], super().open_all(free, at_end), strict=True))
        try:
            for request in requests:
                if not request.pooling:
                    streams[request.request_id] = self._guard(request, hears_ends_only=request.request_id in at_end)
        except BaseException:
            for stream in streams.values():
                stream.close()
            raise
        return [streams[request.request_id] for request in requests]

    def _check(self, request: EngineRequest) -> None:
        if request.decoding is not None and self._hooks.is_lockstep:
            raise RequestError(
                "beams: a hook of this engine waits with each token and may choose the next one, which beams choose "
                "together. Sample instead.",
                param="beam_width",
            )

    def _guard(self, request: EngineRequest, *, hears_ends_only: bool) -> GuardedStream:
        self._follow_loop()
        self._check_alive()
        assert self._hooks.renderer is not None, "the renderer is there before the first request"
        if self._hooks.watching and request.decoding is None:
            request = msgspec.structs.replace(request, permitted=self._hooks.ahead)
        stream = GuardedStream(request, self._hooks, self._hooks.renderer, self, hears_ends_only=hears_ends_only)
        self._guarded[request.request_id] = stream
        stream.begin()
        return stream

    def extend(self, request_id: int, token_ids: list[int], *, is_final: bool = False) -> None:
        guarded = self._guarded.get(request_id)
        if guarded is None or not guarded.extend(token_ids, is_final=is_final):
            super().extend(request_id, token_ids, is_final=is_final)

    def abort(self, request_id: int, index: int | None = None) -> None:
        guarded = self._guarded.get(request_id)
        if guarded is not None and index is not None:
            guarded.drop(index)
        if guarded is None or not guarded.abort_unsent():
            super().abort(request_id, index)

    def statistics(self) -> dict[str, float]:
        return {**super().statistics(), **self._hooks.statistics()}

    # ------------------------------------------------------------------------------------------ for guarded streams

    def open_now(self, request: EngineRequest) -> RequestStream:
        [stream] = super().open_all([request])
        return stream

    def permit(self, permit: PermitTokens) -> None:
        if self.failure is None:
            self._send(permit)

    def drop(self, request_id: int, index: int) -> None:
        super().abort(request_id, index)

    def closed(self, request_id: int) -> None:
        self._guarded.pop(request_id, None)
