"""Admission control: which waiting requests may start now, and which running ones make room for them.

Decides by rows and blocks: a request starts when its rows are free and all its tokens find blocks, else it would be
preempted half-way. Remembers who was turned away, so that a long prompt is not looked up again in every step. Called by
the scheduler while it decides a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Status
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.recovery import Recovery
from quire.engine_core.scheduler.transfers import Transfers
from quire.messages import IntArray, int_array
from quire.observability.recorder import Counts

# steps after which a request that waits for blocks looks again what it finds computed
_LOOK_AGAIN_AFTER = 16
# more steps than anybody asks about
_FOR_EVER = 1 << 30
# so many requests that wait, at most, are priced to see that all of them have room
_MOST_LOOKED_AT = 4
# One that came back for a piece of input keeps its place for so many steps, while it waits for the next piece. Else it
# would give way at once, and all of it would be computed again for every piece.
_STAYS_FOR = 16


class AdmissionControl:
    """Asks the policy who is next. A preempted request goes before everything new that is not more important."""

    def __init__(
        self,
        manager: KVCacheManager,
        rows: Rows,
        policy: SchedulingPolicy,
        recovery: Recovery,
        lifecycle: Lifecycle,
        transfers: Transfers,
        step_tokens: int,
        granted: IntArray,
    ) -> None:
        self._manager = manager
        self._estimates = manager.estimates
        self._open_inputs = lifecycle.open_inputs
        self._rows = rows
        self._policy = policy
        self._recovery = recovery
        self._lifecycle = lifecycle
        self._transfers = transfers
        self._recorder = lifecycle.recorder
        self._running = lifecycle.running
        self._queues = lifecycle.queues
        self._step_tokens = step_tokens
        self._granted = granted
        self._step = 0
        # What `_row_lenders` found. None: somebody may have come or gone since, and it looks again.
        self._lenders: list[Request] | None = None
        # the new request that had no room the last time, and how many had arrived by then
        self._turned_away: Request | None = None
        self._num_arrivals_then = 0
        self._has_results_to_come = False

    def begin_step(self, step: int, *, has_results_to_come: bool) -> None:
        """A step is about to be decided; nothing has been granted yet.

        Who must make way does so now: later, others may count on what was granted to it.
        """
        self._step = step
        self._lenders = None
        self._has_results_to_come = has_results_to_come
        if self._queues.are_empty:
            return
        head = next(self._heads(), None) if self._lesser_has_row() else None
        if head is not None and not self.may_start(head):
            self._make_way(head)

    # ------------------------------------------------------------------------------------------ who is next

    def next(self) -> Request | None:
        """The request that starts now."""
        if self._queues.are_empty:
            return None
        self._lenders = None
        for head in self._heads():
            # where no input is open, nobody lends
            if self.may_start(head) and (not self._open_inputs or self._borrows(head)):
                head.stays_until = self._step + _STAYS_FOR if head.was_started else 0
                return head
            if head.status is Status.WAITING:
                if self._turned_away is not head:
                    self._recorder.turned_away(head.request_id, *self.lacks(head))
                self._turned_away = head
                self._num_arrivals_then = self._lifecycle.num_arrivals
        return None

    def waiting(self) -> Iterator[Request]:
        """Those that never ran, in the policy's order."""
        return self._policy.waiting(self._queues, self._queues.limit, self.num_remaining)

    def num_remaining(self, request: Request) -> int:
        """What it would compute if it started now; algorithm 2 refreshes it whenever somebody has started."""
        (sequence,) = request.sequences.values()
        num_computed = self._manager.get_computed_blocks(sequence).num_tokens
        if self._transfers.concerns(request):
            num_computed += self._transfers.num_found(sequence, num_computed)
        return sequence.num_total_tokens - num_computed

    def num_steps_without_start(self, step: int) -> int:
        """In so many steps from this one on nobody would start, if nobody comes or ends, nobody gives way, and blocks
        only become fewer. 0: somebody may."""
        if self._queues.are_empty:
            return _FOR_EVER
        if not self._queues.num_preempted and self._has_newcomers() and self._num_free_rows > 0:
            return 0
        if self._open_inputs or self._lesser_has_row():
            return 0
        if self._queues.num_preempted:
            # new ones are more important than these, or wait behind them
            if self._may_let_new_ones_in() and next(self.waiting(), None) is not None:
                return 0
            first = min(self._queues.preempted(), key=self._rank)
            return self._num_steps_without(first, step) if self._may_have_rows(first) else 0
        if self._num_free_rows <= 0:
            return _FOR_EVER
        turned_away = self._turned_away
        if turned_away is None or self._has_newcomers():
            return 0
        return self._num_steps_without(turned_away, step) if self._queues.is_waiting(turned_away) else 0

    def _has_newcomers(self) -> bool:
        """Nobody was turned away, or somebody has come since."""
        return self._turned_away is None or self._num_arrivals_then != self._lifecycle.num_arrivals

    def _num_steps_without(self, head: Request, step: int) -> int:
        """Before it looks again whether blocks suffice by now, and too few are there."""
        return max(0, head.look_again_at - step) if self._manager.num_within_reach < head.needed_blocks else 0

    def has_blocks_for_all(self, num_blocks: int) -> bool:
        """So many are surely enough for all that wait; where it takes more than a look at a few, the answer is no."""
        if self._queues.num_preempted or self._open_inputs or len(self._queues) > _MOST_LOOKED_AT:
            return False
        if self._queues.are_empty:
            return num_blocks >= 0
        needed = sum(
            self._estimates.most_blocks(request.longest + 1, request, self._step_tokens)
            for request in self._queues.in_line()
        )
        return needed <= num_blocks

    @property
    def is_anybody_protected(self) -> bool:
        """Somebody has come back not long ago, and others leave it blocks."""
        return bool(self._recovery.protected)

    def make_room_for_stuck(self) -> bool:
        """Nothing was granted. Whether somebody who waits has more room now, or has ended: the step is decided anew.

        In this order, as far as it takes: those that keep their places while they wait for input lend them again; what
        the stuck one would begin behind gives up blocks; all that wait for input give way; the stuck one ends.
        """
        if self._has_results_to_come or self._queues.most_important is None:
            return False
        if self._ends_stays():
            return True
        if (stuck := self._stuck()) is None:
            return False
        if self._frees_what_it_finds(stuck):
            return True
        idle = [request for request in self._running.requests if request.waits_for_input]
        for request in idle:
            self.preempt(request, f"it waits for input, and request {stuck.request_id} for room")
        reason = self._reason_to_give_up(stuck) if not idle else None
        if reason is not None:
            self._lifecycle.end_request(stuck, "error", reason)
        return bool(idle) or reason is not None

    def _stuck(self) -> Request | None:
        """Who finds its rows and waits for blocks, though nothing runs that could give some."""
        for head in self._heads():
            if self._may_have_rows(head, self._preempted_with_rows(head) if self._policy.is_preemptive else ()):
                return head
        return None

    def _ends_stays(self) -> bool:
        """Those that keep their places lend them again. Their time is counted in steps, and none is decided."""
        self._lenders = None
        staying = [request for request in self._open_inputs.values() if request.stays_until > self._step]
        for request in staying:
            request.stays_until = 0
        return bool(staying)

    def _frees_what_it_finds(self, stuck: Request) -> bool:
        """Nobody else can give any blocks: those that it would begin behind do, and it computes their tokens again."""
        is_alone = all(request.waits_for_input for request in self._running.requests)
        return is_alone and self._manager.give_up_for(stuck)

    def _reason_to_give_up(self, stuck: Request) -> str | None:
        """Not expected: each was accepted as one that fits alone. It must not hang."""
        needed = self._estimates.blocks_to_come(stuck, self._step_tokens)
        there = self._manager.num_within_reach
        if self._running.requests or needed <= there:
            return None
        return f"KV cache: {needed} more blocks are needed, {there} can be had."

    def _heads(self) -> Iterator[Request]:
        """Who may start next: a new request that is more important than all that gave way, then those that gave way.

        A more important request must not wait for those; and one of those that has kept its rows must not wait behind
        one that finds none.
        """
        head = next(self.waiting(), None) if self._may_let_new_ones_in() else None
        if head is not None:
            yield head
            if self._policy.is_preemptive:
                return  # strict priority: less important ones that gave way do not slip in where it has no room
        for request in sorted(self._queues.preempted(), key=self._rank):
            if not self._has_token_to_come(request):
                yield request
            if self._may_have_rows(request):
                return  # what came later may have kept its rows, but does not overtake it for blocks

    def _has_token_to_come(self, request: Request) -> bool:
        """A step in flight may bring it a token, and it goes on when it knows that one. Who gives way in the step that
        is being decided waits for results in any case: it shall not come back in the same step."""
        if not self._has_results_to_come or request.preempted_at == self._step:
            return self._has_results_to_come
        rows = int_array([sequence.row for sequence in request.sequences.values()])
        return bool(self._rows.are_in_flight(rows).any())

    def _rank(self, request: Request) -> tuple[int, int]:
        return self._policy.key(request.priority, 0), request.arrival

    def _may_let_new_ones_in(self) -> bool:
        """The policy need not look where it would find nobody: it may look up the prompts of all that it considers."""
        if not (self._num_free_rows > 0 or self._lesser_has_row() or self._row_lenders()):
            return False
        turned_away = self._turned_away
        return (
            turned_away is None
            or self._has_newcomers()
            or not self._queues.is_waiting(turned_away)
            or not self._is_still_too_little(turned_away)
        )

    def _lesser_has_row(self) -> bool:
        """The policy is preemptive, and somebody less important than a request that does not run has a row: it runs, or
        gave way and kept it."""
        most_important = self._queues.most_important
        return self._policy.is_preemptive and most_important is not None and self._rows.least_important > most_important

    # ------------------------------------------------------------------------------------------ is there room

    def may_start(self, request: Request) -> bool:
        """It finds its rows, and blocks for all its tokens: else it would be preempted half-way."""
        return self._may_have_rows(request) and self._has_blocks(request)

    def lacks(self, request: Request) -> tuple[str, int, int]:
        """(what, how much of it, how much is there) of one that was turned away."""
        if not self._may_have_rows(request):
            return "rows", request.num_rows, max(0, self._num_free_rows + _num_rows(self._row_lenders()))
        return "memory", request.needed_blocks, self._manager.num_within_reach

    def why_waits(self, request: Request) -> tuple[str, int, int]:
        """(for what, how much, how much is there) of one that does not run; looks nothing up, so it may be old.

        input: more of its prompt; blocks: that come from elsewhere, or an adapter; rows or memory: it was turned away;
        order: others go first; turn: for the next step.
        """
        turned_away = self._turned_away
        if self._queues.is_awaiting(request):
            return "blocks", 0, 0
        if request.waits_for_input or not request.num_prompt_tokens:
            return "input", 0, 0
        if request.status is Status.PREEMPTED or request is turned_away:
            lacks = self.lacks(request)
            return lacks if lacks[1] > lacks[2] else ("turn", 0, 0)
        limit = self._queues.limit
        is_behind = turned_away is not None and self._queues.is_waiting(turned_away)
        if is_behind or (limit is not None and request.priority >= limit):
            return "order", 0, 0
        # nobody was turned away yet, because nobody is looked at while no row is free
        return ("turn", 0, 0) if self._may_have_rows(request) else self.lacks(request)

    def counts(self) -> Counts:
        """For the recorder."""
        pool = self._manager.pool
        queues = self._queues
        return len(self._running.requests), len(queues), queues.num_preempted, pool.num_held, pool.num_cached

    def waits(self) -> dict[str, int]:
        """How many wait, by what those wait for who are the next: the others wait behind them."""
        going_on = self._queues.preempted()
        num_blocks = self._queues.num_awaiting
        num_input = self._queues.num_silent + self._queues.num_preempted - len(going_on)
        first = self._turned_away
        # nothing new starts before what gave way has gone on
        if going_on or first is None or not self._queues.is_waiting(first):
            first = next(filter(self._is_in_line, self._queues.in_line()), None)
        what = self.why_waits(first)[0] if first is not None else "turn"
        waits = {what: len(self._queues) - num_input - num_blocks, "input": num_input}
        return waits | {"blocks": num_blocks} if num_blocks else waits

    def _is_in_line(self, request: Request) -> bool:
        return not request.waits_for_input and not self._queues.is_awaiting(request)

    @property
    def _num_free_rows(self) -> int:
        """Those that nobody has, less those that are set aside for forks."""
        return self._rows.num_free - self._running.num_reserved_rows

    def _may_have_rows(self, request: Request, others: Sequence[Request] = ()) -> bool:
        """It has its rows, or finds as many with those of `others` and of who only waits for input."""
        if request.holds_rows:
            return True
        num_more = request.num_rows - self._num_free_rows
        return num_more <= 0 or num_more <= _num_rows(others) + _num_rows(self._row_lenders())

    def _has_blocks(self, request: Request) -> bool:
        """A question, which takes nothing: kept sequences give up blocks when these are allocated, and cached ones are
        evicted then, but not those that it finds computed. Whoever only waits for input may be asked for its blocks."""
        if self._is_still_too_little(request):
            return False
        request.needed_blocks = self._num_needed(request, self._running.requests)
        is_within_reach = request.needed_blocks <= self._manager.num_within_reach
        if is_within_reach or self._fits_without(self._block_lenders(), request):
            return True
        request.look_again_at = self._step + _LOOK_AGAIN_AFTER
        return False

    def _fits_without(self, idle: list[Request], request: Request) -> bool:
        """Whether it would have its blocks if all of these gave way."""
        if not idle:
            return False
        with self._manager.offering(idle):
            others = [other for other in self._running.requests if other not in idle]
            return self._num_needed(request, others) <= self._manager.num_within_reach

    def _num_needed(self, request: Request, running: list[Request]) -> int:
        # One that was preempted must also get on by a block before it gives way again. Alone it gives way to nobody.
        num_more = self._manager.block_size if request.was_started and running else 0
        needed = self._estimates.blocks_to_come(request, self._step_tokens, num_more)
        if request.was_started or self._recovery.protected:
            needed += self._recovery.num_reserved_blocks(request, running, self._step_tokens)
        return needed

    def _is_still_too_little(self, request: Request) -> bool:
        """Looking a long prompt up in every step would cost more than the step. Where nobody is granted a token it
        looks all the same: without a step, the one in which it would look again never comes."""
        is_recent = self._step < request.look_again_at and bool(self._granted.any())
        return is_recent and self._manager.num_within_reach < request.needed_blocks

    # ------------------------------------------------------------------------------------------ making way

    def preempt(self, request: Request, reason: str, *, is_void: bool = False) -> None:
        """It gives up all its blocks, to be computed again or into swap space, and waits to go on. `is_void`: what they
        hold may not be read again."""
        request.preempted_at = self._step
        request.stays_until = 0
        self._lenders = None
        request.parked_with = request.num_prompt_tokens if request.waits_for_input else -1
        self._recovery.preempt(request, reason, is_void=is_void)
        self._recorder.preempted(request.request_id, reason, is_swapped=request.is_swapped)
        self._running.leave(request)
        self._queues.add_preempted(request)

    def _lends(self, request: Request) -> bool:
        """It only waits for input, so others may have its rows and its blocks: unless it has come back not long ago."""
        return request.waits_for_input and request.holds_rows and self._step >= request.stays_until

    def _row_lenders(self) -> list[Request]:
        """They run, or gave way and kept their rows. Looked for once where many ask."""
        if self._lenders is None:
            self._lenders = [request for request in self._open_inputs.values() if self._lends(request)]
        return self._lenders

    def _block_lenders(self) -> list[Request]:
        return [request for request in self._row_lenders() if request.status is Status.RUNNING]

    def _borrows(self, head: Request) -> bool:
        """Only as many lenders give way as it takes. Whether the head has room now, and starts."""
        if not head.holds_rows and head.num_rows > self._num_free_rows:
            # blocks that it shares with who gave way are held by nobody now, so its need is counted anew
            self._borrow_rows(head)
        elif head.needed_blocks <= self._manager.num_within_reach:
            return True
        lenders = self._block_lenders()
        while self._num_needed(head, self._running.requests) > self._manager.num_within_reach:
            if not lenders:
                return False
            victim = self._policy.victim(lenders)
            lenders.remove(victim)
            self.preempt(victim, f"it waits for input, and request {head.request_id} for blocks")
        return True

    def _borrow_rows(self, head: Request) -> None:
        while head.num_rows > self._num_free_rows and (lenders := self._row_lenders()):
            # who has given way already has no blocks here to lose
            victim = self._policy.victim([other for other in lenders if other.status is not Status.RUNNING] or lenders)
            if victim.status is Status.RUNNING:
                self.preempt(victim, f"it waits for input, and request {head.request_id} for a row")
            self.displace(victim)

    def _make_way(self, head: Request) -> None:
        """Less important requests give up rows and blocks until it has room; nobody does in vain."""
        lesser = [other for other in self._running.requests if self._gives_way_to(other, head)]
        if not self._would_fit(head, lesser):
            return
        reason = f"request {head.request_id} is more important (priority {head.priority})"
        while not self._has_blocks_now(head) and lesser:
            victim = self._policy.victim(lesser)
            lesser.remove(victim)
            self.preempt(victim, reason)
        self._free_rows(head, lesser, reason)

    def _gives_way_to(self, other: Request, head: Request) -> bool:
        """Who lends is not among them: it gives way to any head that starts (`_borrows`)."""
        is_lesser = other.priority > head.priority and self._recovery.may_be_victim(other)
        return is_lesser and not self._lends(other)

    def _would_fit(self, head: Request, lesser: list[Request]) -> bool:
        if not self._may_have_rows(head, [*lesser, *self._preempted_with_rows(head)]):
            return False
        who_go = [*lesser, *self._block_lenders()]
        # A block for each of those who go on, which they need before long: else others would give way for the head, and
        # then the head itself.
        others = [other for other in self._running.requests if other not in who_go]
        with self._manager.offering(who_go):
            needed = self._estimates.blocks_to_come(head, self._step_tokens) + len(others)
            return max(needed, self._num_needed(head, others)) <= self._manager.num_within_reach

    def _has_blocks_now(self, head: Request) -> bool:
        """Looks again at once, for others are giving way."""
        head.look_again_at = 0
        return self._has_blocks(head)

    def _preempted_with_rows(self, head: Request) -> list[Request]:
        """Less important requests that have given way already and kept their rows."""
        preempted = self._queues.all_preempted()
        lesser = [other for other in preempted if other.priority > head.priority]
        return [other for other in lesser if other.holds_rows and not self._lends(other)]

    def _free_rows(self, head: Request, lesser: list[Request], reason: str) -> None:
        """Rows of those that have given way already come first: they have no blocks here to lose."""
        while not self._may_have_rows(head):
            preempted = self._preempted_with_rows(head)
            if not preempted and not lesser:
                return
            if not preempted:
                victim = self._policy.victim(lesser)
                lesser.remove(victim)
                self.preempt(victim, reason)
                preempted = [victim]
            self.displace(self._policy.victim(preempted))

    def displace(self, victim: Request) -> None:
        """One that has given way loses its rows, and what it has in swap space: it will be computed again."""
        self._lenders = None
        self._recovery.forget_swapped(victim)
        self._lifecycle.displace(victim)


def _num_rows(requests: Iterable[Request]) -> int:
    return sum(request.num_rows for request in requests)
