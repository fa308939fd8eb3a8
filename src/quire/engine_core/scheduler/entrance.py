"""The entrance: which of those who do not run may start now, and who makes way for them.

Decides by rows and blocks: a request starts when its rows are free and all its tokens find blocks, else it would be
preempted half-way. Remembers who was turned away, so that a long prompt is not looked up again in every step. Called by
the scheduler while it decides a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Status
from quire.engine_core.rows import Rows
from quire.engine_core.scheduler.lifecycle import Lifecycle
from quire.engine_core.scheduler.policies.policy import SchedulingPolicy
from quire.engine_core.scheduler.recovery import Recovery
from quire.engine_core.scheduler.transfers import Transfers
from quire.messages import IntArray
from quire.observability.recorder import Counts

# steps after which a request that waits for blocks looks again what it finds computed
_LOOK_AGAIN_AFTER = 16
# steps in which one that came back for a piece of input may wait for the next one, and need not be computed again
_STAYS_FOR = 16


class Entrance:
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
        # the new request that had no room the last time, and how many had arrived by then
        self._turned_away: Request | None = None
        self._num_arrivals_then = 0
        self._has_results_to_come = False

    def open(self, step: int, *, has_results_to_come: bool) -> None:
        """A step is about to be decided; nothing has been granted yet.

        Who must make way does so now: later, others may count on what was granted to it.
        """
        self._step = step
        self._has_results_to_come = has_results_to_come
        idle = self._idle_row_holders()
        if not (idle or self._may_displace()):
            return
        head = next(self._heads(), None)
        if head is not None and not self._has_rows(head) and idle:
            self._take_rows_of(idle, head)
        if head is not None and self._policy.is_preemptive and not self.may_start(head):
            self._make_way(head)

    def _idle_row_holders(self) -> list[Request]:
        """Who only waits for input stands in nobody's way: also not in a row, when rows are short."""
        if self._rows.num_free > self._running.num_reserved_rows:
            return []
        return [one for one in self._lifecycle.streams.values() if one.holds_rows and one.is_idle]

    def _take_rows_of(self, idle: list[Request], head: Request) -> None:
        while idle and not self._has_rows(head):
            victim = self._policy.victim(idle)
            idle.remove(victim)
            if victim.status is Status.RUNNING:
                self.push_out(victim, f"it waits for input, and request {head.request_id} for a row")
            self._recovery.give_up_swapped(victim)
            self._lifecycle.displace(victim)

    # ------------------------------------------------------------------------------------------ who is next

    def next(self) -> Request | None:
        """The request that starts now."""
        for head in self._heads():
            if self.may_start(head) and self._has_taken_blocks_of_idle_ones(head):
                head.stays_until = self._step + _STAYS_FOR if head.was_started else 0
                return head
            if head.status is Status.WAITING:
                if self._turned_away is not head:
                    self._recorder.turned_away(head.request_id, *self.lacks(head))
                self._turned_away, self._num_arrivals_then = head, self._lifecycle.num_arrivals
            if self._policy.is_preemptive and self._is_more_important_than_others(head):
                return None
        return None

    def waiting(self) -> Iterator[Request]:
        """Those that never ran, in the policy's order."""
        return self._policy.waiting(self._queues, self._queues.limit, self.num_remaining)

    def num_remaining(self, request: Request) -> int:
        """What it would compute if it started now; algorithm 2 refreshes it whenever somebody has started."""
        (sequence,) = request.sequences.values()
        num_computed = self._manager.get_computed_blocks(sequence).num_tokens
        return sequence.num_total_tokens - num_computed - self._transfers.num_found(sequence, num_computed)

    def stuck(self) -> Request | None:
        """Who waits for room though nothing runs that could give some. Rather one that has its rows, which only blocks
        can help: others may wait for rows that it holds."""
        if self._has_results_to_come:
            return None
        heads = list(self._heads())
        return next(filter(self._has_rows, heads), heads[0] if heads else None)

    def is_freed_of_its_session(self, stuck: Request) -> bool:
        """Nobody else can give any blocks: those that it continues do, and it computes their tokens again."""
        is_alone = not self._running.requests and self._has_rows(stuck)
        return is_alone and self._manager.kept.give_up_blocks_of(stuck.message.continues)

    def reason_to_give_up(self, stuck: Request) -> str | None:
        """Not expected: each was accepted as one that fits alone. It must not hang."""
        needed = self._manager.estimates.blocks_to_come(stuck, self._step_tokens)
        there = self._manager.num_within_reach
        if self._running.requests or needed <= there:
            return None  # it waits for rows, say
        return f"KV cache: {needed} more blocks are needed, {there} can be had."

    def _heads(self) -> Iterator[Request]:
        """The heads of the lines: new requests that are more important than what gave way, then what gave way.

        More important requests must not wait for those that gave way, nor these for rows that they hold themselves.
        """
        head = next(self.waiting(), None) if self._may_let_new_ones_in() else None
        if head is not None:
            yield head
        for request in sorted(self._queues.preempted(), key=self._rank):
            # What gave way in this step has a token in flight; its value comes before the next step is decided.
            if not (self._has_results_to_come and request.preempted_at == self._step):
                yield request
            if self._has_rows(request):
                return  # what came later may have kept its rows, but does not overtake it for blocks

    def _rank(self, request: Request) -> tuple[int, int]:
        return self._policy.key(request.priority, 0), request.arrival

    def _may_let_new_ones_in(self) -> bool:
        """The policy need not look where it would find nobody: it may look up the prompts of all that it considers."""
        has_rows = self._rows.num_free > self._running.num_reserved_rows
        if not (has_rows or self._may_displace() or self._idle_row_holders()):
            return False
        before = self._turned_away
        return (
            before is None
            or self._num_arrivals_then != self._lifecycle.num_arrivals
            or not self._queues.is_waiting(before)
            or not self._is_still_too_little(before)
        )

    def _may_displace(self) -> bool:
        """Somebody less important than a request that does not run has a row."""
        most_important = self._queues.most_important
        return (
            self._policy.is_preemptive and most_important is not None and self._rows.greatest_priority > most_important
        )

    def _is_more_important_than_others(self, head: Request) -> bool:
        """Strict priority: less important requests that have given way do not slip in where it has no room."""
        limit = self._queues.limit
        return head.status is Status.WAITING and limit is not None and head.priority < limit

    # ------------------------------------------------------------------------------------------ is there room

    def may_start(self, request: Request) -> bool:
        """Its rows are free, and blocks for all its tokens: else it would be preempted half-way."""
        return self._has_rows(request) and self._has_blocks(request)

    def lacks(self, request: Request) -> tuple[str, int, int]:
        """(what, how much of it, how much is there) of one that was turned away."""
        if not self._has_rows(request):
            return "rows", request.num_rows, max(0, self._rows.num_free - self._running.num_reserved_rows)
        return "memory", request.needed_blocks, self._manager.num_within_reach

    def why_waits(self, request: Request) -> tuple[str, int, int]:
        """(for what, how much, how much is there) of one that does not run; looks nothing up, so it may be old.

        input: more of its prompt; rows or memory: it was turned away; order: others go first; turn: for the next step.
        """
        before = self._turned_away
        if request.is_idle or not request.num_prompt_tokens:
            return "input", 0, 0
        if request.status is Status.PREEMPTED or request is before:
            lacks = self.lacks(request)
            return lacks if lacks[1] > lacks[2] else ("turn", 0, 0)
        limit = self._queues.limit
        is_behind = before is not None and self._queues.is_waiting(before)
        if is_behind or (limit is not None and request.priority >= limit):
            return "order", 0, 0
        # nobody was turned away yet, because nobody is looked at while no row is free
        return ("turn", 0, 0) if self._has_rows(request) else self.lacks(request)

    def counts(self) -> Counts:
        """For the recorder."""
        pool, queues = self._manager.pool, self._queues
        return len(self._running.requests), len(queues), queues.num_preempted, pool.num_held, pool.num_cached

    def waits(self) -> dict[str, int]:
        """How many wait, by what those wait for who are the next: the others wait behind them."""
        going_on = self._queues.preempted()
        num_input = self._queues.num_silent + self._queues.num_preempted - len(going_on)
        before = self._turned_away
        # nothing new starts before what gave way has gone on
        first = before if not going_on and before is not None and self._queues.is_waiting(before) else None
        first = first or next((one for one in self._queues.in_line() if not one.is_idle), None)
        what = self.why_waits(first)[0] if first is not None else "turn"
        return {what: len(self._queues) - num_input, "input": num_input}

    def _has_rows(self, request: Request) -> bool:
        return request.holds_rows or request.num_rows <= self._rows.num_free - self._running.num_reserved_rows

    def _has_blocks(self, request: Request) -> bool:
        """A question: kept sequences give up theirs when the blocks are taken, and not those that it finds computed."""
        if self._is_still_too_little(request):
            return False
        needed = self._num_needed(request, self._running.requests)
        if needed <= self._manager.num_within_reach or self._fits_without(self._idle_block_holders(), request):
            return True
        request.needed_blocks, request.look_again_at = needed, self._step + _LOOK_AGAIN_AFTER
        return False

    def _fits_without(self, idle: list[Request], request: Request) -> bool:
        """Whether it would have its blocks if all of these gave way."""
        if not idle:
            return False
        with self._manager.offering(idle):
            others = [one for one in self._running.requests if one not in idle]
            return self._num_needed(request, others) <= self._manager.num_within_reach

    def _num_needed(self, request: Request, running: list[Request]) -> int:
        # One that was preempted must also get on by a block before it gives way again; alone it need not share.
        num_more = self._manager.block_size if request.was_started and running else 0
        reserved = self._recovery.num_reserved_blocks(request, running, self._step_tokens)
        return self._manager.estimates.blocks_to_come(request, self._step_tokens, num_more) + reserved

    def _is_still_too_little(self, request: Request) -> bool:
        """Looking a long prompt up in every step would cost more than the step."""
        is_recent = self._step < request.look_again_at and bool(self._granted.any())
        return is_recent and self._manager.num_within_reach < request.needed_blocks

    # ------------------------------------------------------------------------------------------ making way

    def push_out(self, request: Request, reason: str) -> None:
        """It gives up all its blocks, by recomputation or into swap space, and waits to go on."""
        request.preempted_at = self._step
        request.is_parked = request.is_idle
        self._recovery.give_up(request, reason)
        self._recorder.preempted(request.request_id, reason, is_swapped=request.is_swapped)
        self._running.leave(request)
        self._queues.add_preempted(request)

    def _idle_block_holders(self) -> list[Request]:
        """Who only waits for input stands in nobody's way with its blocks either."""
        return [
            one
            for one in self._lifecycle.streams.values()
            if one.status is Status.RUNNING and one.is_idle and self._step >= one.stays_until
        ]

    def _has_taken_blocks_of_idle_ones(self, head: Request) -> bool:
        """As few of them give way as are needed. The head starts in this step: nobody else comes in between."""
        idle = self._idle_block_holders()
        if not idle:
            return True  # it has room without
        while self._num_needed(head, self._running.requests) > self._manager.num_within_reach:
            if not idle:
                return False
            victim = self._policy.victim(idle)
            idle.remove(victim)
            self.push_out(victim, f"it waits for input, and request {head.request_id} for blocks")
        return True

    def _make_way(self, head: Request) -> None:
        """Less important requests give up rows and blocks until it has room; nobody does in vain."""
        lesser = [one for one in self._running.requests if self._gives_way_to(one, head)]
        if not self._would_fit(head, lesser):
            return
        reason = f"request {head.request_id} is more important (priority {head.priority})"
        while not self._has_blocks_after_all(head) and lesser:
            victim = self._policy.victim(lesser)
            lesser.remove(victim)
            self.push_out(victim, reason)
        self._free_rows(head, lesser, reason)

    def _gives_way_to(self, other: Request, head: Request) -> bool:
        return other.priority > head.priority and self._recovery.may_be_victim(other)

    def _would_fit(self, head: Request, lesser: list[Request]) -> bool:
        row_holders = [*lesser, *(one for one in self._queues.all_preempted() if one.priority > head.priority)]
        num_rows = self._rows.num_free - self._running.num_reserved_rows
        num_rows += sum(one.num_rows for one in row_holders if one.holds_rows)
        if not (head.holds_rows or head.num_rows <= num_rows):
            return False
        who_go = [*lesser, *(one for one in self._idle_block_holders() if one not in lesser)]
        # Those who go on need a block each before long: the head would be the next to give way.
        num_others = len(self._running.requests) - len(who_go)
        with self._manager.offering(who_go):
            needed = self._manager.estimates.blocks_to_come(head, self._step_tokens) + num_others
            return needed <= self._manager.num_within_reach

    def _has_blocks_after_all(self, head: Request) -> bool:
        head.look_again_at = 0
        return self._has_blocks(head)

    def _free_rows(self, head: Request, lesser: list[Request], reason: str) -> None:
        """Rows of those that have given way already come first: they lose nothing but their place."""
        while not self._has_rows(head):
            out = [one for one in self._queues.all_preempted() if one.priority > head.priority and one.holds_rows]
            if not out and not lesser:
                return
            if not out:
                victim = self._policy.victim(lesser)
                lesser.remove(victim)
                self.push_out(victim, reason)
                out = [victim]
            victim = self._policy.victim(out)
            self._recovery.give_up_swapped(victim)
            self._lifecycle.displace(victim)
