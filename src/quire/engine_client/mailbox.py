"""Mailboxes: where the columns of a step's output are split into requests.

Owns what has arrived for each request and was not yet read. What arrives while a reader is slow is merged into what
lies there already, so a mailbox never grows faster than the text it stands for. Knows no sockets and no event loop.
It must never raise on what the core sends: outputs for unknown sequences are counted and dropped
(an abort and a last token may cross each other on their way).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quire.engine_client.deltas import TokenDelta
from quire.errors import EngineDeadError
from quire.messages import EngineOutputs, sequence_id_of, split_sequence_id, split_sequence_ids

# tokens of a sequence that a slow reader has not taken, before they are packed
_MOST_LOOSE = 64


def nobody() -> None:
    """Nobody is to be told."""


class Mailbox:
    """What comes of one request, as a Stream: unread deltas, one a sequence, for its one reader.

    Owns them until they are taken. What is not taken is merged, so the reader may be as slow as it likes.
    """

    __slots__ = (
        "_close",
        "failure",
        "hears_ends_only",
        "is_packed",
        "on_news",
        "open_indices",
        "pending",
        "request_id",
    )

    def __init__(
        self, request_id: int, num_sequences: int, close: Callable[[Mailbox], None], *, hears_ends_only: bool
    ) -> None:
        self.request_id = request_id
        self.pending: dict[int, TokenDelta] = {}
        # some of these have so many tokens that they are packed
        self.is_packed = False
        # sequences that may still bring something
        self.open_indices = set(range(num_sequences))
        # called when something has come into an empty box
        self.on_news: Callable[[], None] = nobody
        # its reader takes everything when the last sequence has ended, and is told then
        self.hears_ends_only = hears_ends_only
        # why nothing more will come, once the engine is gone
        self.failure: str | None = None
        self._close = close

    def tell(self, reader: Callable[[], None]) -> None:
        self.on_news = reader

    @property
    def has_news(self) -> bool:
        return bool(self.pending) or self.failure is not None

    @property
    def has_ended(self) -> bool:
        """Nothing more will come; what has come may not be taken yet."""
        return not self.open_indices or self.failure is not None

    @property
    def is_done(self) -> bool:
        return not self.open_indices and not self.pending

    def take(self) -> Iterable[TokenDelta]:
        if self.pending:
            pending = self.pending
            self.pending = {}
            if self.is_packed:
                self.is_packed = False
                for delta in pending.values():
                    delta.unpack()
            return pending.values()
        if self.failure is not None and self.open_indices:
            raise EngineDeadError(self.failure)
        return ()

    def close(self) -> None:
        """Ends what has not ended. May be called again."""
        self._close(self)

    async def aclose(self) -> None:
        self._close(self)


class Mailboxes:
    """All requests in flight, by id."""

    def __init__(self) -> None:
        self._boxes: dict[int, Mailbox] = {}
        # whose readers want to hear of each token; read by another thread
        self.num_eager = 0
        self.num_late_outputs = 0
        # tokens that were generated, and that no reader was left for
        self.num_wasted_tokens = 0
        # of the images of requests that are open, by id: the engine keeps them as long
        self._image_bytes: dict[int, int] = {}

    @property
    def num_image_bytes(self) -> int:
        return sum(self._image_bytes.values())

    def note_images(self, request_id: int, num_bytes: int) -> None:
        self._image_bytes[request_id] = num_bytes

    def __len__(self) -> int:
        return len(self._boxes)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._boxes

    def open(
        self,
        request_id: int,
        num_sequences: int,
        close: Callable[[Mailbox], None] | None = None,
        *,
        hears_ends_only: bool = False,
    ) -> Mailbox:
        """`close` ends the request in the core as well, where that has to be done."""
        assert request_id not in self._boxes, f"request_id={request_id} is in flight already"
        box = Mailbox(request_id, num_sequences, close or self._forget, hears_ends_only=hears_ends_only)
        self._boxes[request_id] = box
        self.num_eager += not hears_ends_only
        return box

    def _forget(self, box: Mailbox) -> None:
        self.close(box.request_id)

    def close(self, request_id: int) -> bool:
        """The reader wants no more of this request; what it did not read is gone. False if it was closed before."""
        box = self._boxes.pop(request_id, None)
        if box is None:
            return False
        self._image_bytes.pop(request_id, None)
        self.num_eager -= not box.hears_ends_only
        self.num_wasted_tokens += sum(delta.num_tokens for delta in box.pending.values())
        box.pending = {}
        return True

    def close_sequence(self, request_id: int, index: int) -> None:
        """The reader wants no more of this sequence."""
        box = self._boxes.get(request_id)
        if box is not None:
            box.open_indices.discard(index)
            unread = box.pending.pop(index, None)
            self.num_wasted_tokens += unread.num_tokens if unread is not None else 0

    def statistics(self) -> dict[str, float]:
        return {
            "requests_open": len(self._boxes),
            "image_bytes_open": self.num_image_bytes,
            "late_outputs_dropped": self.num_late_outputs,
            "num_wasted_tokens_total": self.num_wasted_tokens,
        }

    def boxes(self) -> list[Mailbox]:
        return list(self._boxes.values())

    def deliver(self, outputs: EngineOutputs) -> list[Mailbox]:
        """Sorts one step's output in; returns the mailboxes that were empty before, whose readers are to be told."""
        filled: list[Mailbox] = []
        delta_of = self._delta_of
        for start in outputs.starts:
            if (delta := delta_of(start.sequence_id, filled)) is not None:
                delta.num_cached_tokens = start.num_cached_tokens
                delta.first_miss = start.first_miss
        boxes = self._boxes
        ids = split_sequence_ids(outputs.sequence_ids)
        for request_id, index, token_id in zip(*ids, outputs.token_ids.tolist(), strict=False):
            # what `delta_of` does, written out for the one case that comes once a token
            box = boxes.get(request_id)
            if box is not None and not box.pending and index in box.open_indices:
                box.pending[index] = TokenDelta(index, [token_id])
                filled.append(box)
            elif (delta := delta_of(sequence_id_of(request_id, index), filled)) is not None:
                delta.token_ids.append(token_id)
                if len(delta.token_ids) == _MOST_LOOSE:
                    delta.pack()
                    boxes[request_id].is_packed = True
            else:
                self.num_wasted_tokens += 1
        for first in outputs.firsts:
            if (delta := delta_of(first.sequence_id, filled)) is not None:
                delta.share_of_others = first.share_of_others
        for entry in outputs.logprobs:
            if (delta := delta_of(entry.sequence_id, filled)) is not None:
                delta.add_logprobs(entry.positions)
        for entry in outputs.prompt_logprobs:
            if (delta := delta_of(entry.sequence_id, filled)) is not None:
                delta.add_prompt_logprobs(entry.positions)
        for found in outputs.vectors:
            if (delta := delta_of(found.sequence_id, filled)) is not None:
                delta.vector = found.values
        for end in outputs.ends:
            if end.finish_reason == "abort" and not self._is_open(end.sequence_id):
                continue  # the answer to an abort whose reader has left: expected, so not counted
            if (delta := delta_of(end.sequence_id, filled)) is not None:
                delta.finish_reason = end.finish_reason
                delta.stop_reason = end.stop_reason
                delta.error = end.error
                delta.is_refused = end.is_refused
                delta.is_lost = end.is_lost
                delta.num_drafted_tokens = end.num_drafted_tokens
                delta.num_accepted_tokens = end.num_accepted_tokens
                box = self._boxes[split_sequence_id(end.sequence_id)[0]]
                box.open_indices.discard(delta.index)
                if box.hears_ends_only and not box.open_indices:
                    filled.append(box)
        return filled

    def _is_open(self, sequence_id: int) -> bool:
        request_id, index = split_sequence_id(sequence_id)
        box = self._boxes.get(request_id)
        return box is not None and index in box.open_indices

    def _delta_of(self, sequence_id: int, filled: list[Mailbox]) -> TokenDelta | None:
        request_id, index = split_sequence_id(sequence_id)
        box = self._boxes.get(request_id)
        if box is None or index not in box.open_indices:
            self.num_late_outputs += 1
            return None
        delta = box.pending.get(index)
        if delta is None:
            if not box.pending:
                filled.append(box)
            delta = box.pending[index] = TokenDelta(index)
        return delta
