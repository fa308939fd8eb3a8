"""FasterTransformer's admission rule (3.6.1): the earliest requests start together, into an empty engine only.

Nothing starts while a request of the batch runs, whoever has ended meanwhile. The batch is as large as memory allows,
because each request is given room for the longest sequence (`longest`); a step's budget must hold its prompts.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.policies.fifo import Fifo
from quire.engine_core.scheduler.policies.policy import NumRemaining
from quire.engine_core.scheduler.queues import WaitingQueues


class RunToEnd(Fifo):
    """First in, first out, batch by batch."""

    def __init__(self) -> None:
        # those that were let in last, and by request the number of its batch
        self._batch: list[Request] = []
        self.batch_by_request: dict[int, int] = {}
        self._num_batches = 0

    def waiting(self, queues: WaitingQueues, limit: int | None, num_remaining: NumRemaining) -> Iterator[Request]:
        started = [one for one in self._batch if one.status is not Status.WAITING]
        running = [one for one in started if one.status is Status.RUNNING]
        if any(_has_computed(one) for one in running):
            return
        if not running:
            self._batch = []
            self._num_batches += 1
        for request in queues.by_arrival(limit):
            self._batch.append(request)
            self.batch_by_request[request.request_id] = self._num_batches
            yield request


def _has_computed(request: Request) -> bool:
    return any(sequence.num_computed_tokens for sequence in request.sequences.values())
