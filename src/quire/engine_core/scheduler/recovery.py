"""Recovery of preempted requests (3.4.5): who may be a victim, and whether it is swapped out or computed again.

The choice compares two estimates: computing the lost tokens again, and moving their blocks out and in. Both prices were
measured at start. Counts what preemption costs. It has no clock: the time lost is the estimate of what was done.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from quire.engine_core.kv_cache_manager.manager import KVCacheManager
from quire.engine_core.request import Request, Sequence, Status
from quire.engine_core.rows import Rows

logger = logging.getLogger("quire.scheduler")


@dataclass(frozen=True)
class RecoveryCosts:
    """Prices on this machine; a block is moved once in each direction."""

    seconds_per_token: float = 0.0
    seconds_per_block: float = 0.0


class Recovery:
    """`mode` is auto, recompute or swap. Without room in swap space the tokens are computed again."""

    def __init__(self, manager: KVCacheManager, rows: Rows, mode: str, costs: RecoveryCosts) -> None:
        self._manager = manager
        self._cache = manager.cache
        self._swap = manager.swap
        self._estimates = manager.estimates
        self._rows = rows
        self._mode = mode
        self._costs = costs
        self.num_by_recompute = 0
        self.num_by_swap = 0
        self.num_recomputed_tokens = 0
        self.lost_seconds = 0.0
        self.num_broken_protections = 0
        # Those that came back. Some may be victims again, or have ended: `_still_protected` drops them.
        self.protected: list[Request] = []

    @property
    def seconds_per_token(self) -> float:
        """What computing one takes."""
        return self._costs.seconds_per_token

    # ------------------------------------------------------------------------------------------ who

    @staticmethod
    def may_be_victim(request: Request) -> bool:
        """A resumed one first gets on by a block, else two could evict each other. But one whose input is still open
        may wait for its client for ever, and is not protected."""
        return request.longest >= request.protected_until or not request.is_final

    def num_reserved_blocks(self, starting: Request, running: list[Request], step_tokens: int) -> int:
        """Blocks that others need and that it may not start with.

        A new one leaves to resumed requests what they need until they may be victims again. One that is resumed is no
        victim itself meanwhile, so it leaves to all others what they grow by: a token in each step in which its tokens
        are computed again, and a block while it gets on by one. That is an estimate: it shares these steps with others.
        """
        num_more = self._manager.block_size
        if starting.was_started:
            num_more += -(-starting.longest // step_tokens)
        others = running if starting.was_started else self._still_protected()
        return sum(self._estimates.blocks_to_come(request, step_tokens, num_more) for request in others)

    def _still_protected(self) -> list[Request]:
        """Those that were resumed not long ago: few, so that a start need not look at everybody who runs."""
        self.protected = [
            request
            for request in self.protected
            if request.status is Status.RUNNING and not self.may_be_victim(request)
        ]
        return self.protected

    # ------------------------------------------------------------------------------------------ giving way

    def preempt(self, request: Request, reason: str, *, is_void: bool = False) -> None:
        """All blocks of all its sequences leave, to swap space or for good (all or nothing). `is_void`: for good, as
        nobody may read them again."""
        # Promised blocks will not be filled, and a sibling may count on them.
        is_whole = not self._cache.has_promises(request)
        self._cache.break_promises(request)
        choice = self._choose(request) if is_whole and not is_void else "recompute"
        logger.debug(
            "preempted request %d (priority %d, arrival %d): %s; recovery by %s",
            request.request_id, request.priority, request.arrival, reason, choice,
        )  # fmt: skip
        if choice == "swap":
            self.num_by_swap += 1
            self.lost_seconds += self._manager.swap_out(request) * self._costs.seconds_per_block
            return
        self.num_by_recompute += 1
        for sequence in request.sequences.values():
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
            self._manager.free(sequence)
            # 4.4.3: num_computed_tokens becomes 0, the total stays
            self._rows.set_back(sequence.row, 0)

    def forget_swapped(self, request: Request) -> None:
        """One that was swapped out loses its rows, and with them what is in swap space."""
        for sequence in request.sequences.values():
            sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_sure_tokens)
            self._swap.free(sequence)

    def _choose(self, request: Request) -> str:
        if self._mode == "recompute" or not self._swap.num_blocks:
            return "recompute"
        if not all(sequence.is_begun for sequence in request.sequences.values()):
            return "recompute"  # half-way in being computed again
        if self._manager.is_bringing(request):
            return "recompute"  # nothing of it was computed since, and swap space is filled before its blocks are
        num_blocks, num_lost_tokens = self._estimates.what_would_be_lost(request)
        if not self._swap.has_room_for(num_blocks):
            return "recompute"
        if self._mode == "swap":
            return "swap"
        moving = 2 * num_blocks * self._costs.seconds_per_block
        return "swap" if moving < num_lost_tokens * self._costs.seconds_per_token else "recompute"

    # ------------------------------------------------------------------------------------------ coming back

    def bring_back(self, request: Request) -> None:
        """From swap space, with all that its sequences share."""
        self.lost_seconds += self._manager.swap_in(request) * self._costs.seconds_per_block

    def begun(self, sequence: Sequence, num_computed: int) -> None:
        """It gave way before: what had been computed, and is not at hand, is computed again."""
        again = max(0, sequence.num_lost_tokens - num_computed)
        sequence.num_lost_tokens = 0
        self.num_recomputed_tokens += again
        self.lost_seconds += again * self._costs.seconds_per_token

    def protect(self, request: Request) -> None:
        if request.is_final:
            request.protected_until = request.longest + self._manager.block_size
            self.protected = [*(other for other in self.protected if other is not request), request]

    def statistics(self) -> dict[str, float]:
        return {
            "num_preemptions_total": self.num_by_recompute + self.num_by_swap,
            "num_preemptions_by_recompute_total": self.num_by_recompute,
            "num_preemptions_by_swap_total": self.num_by_swap,
            "recomputed_tokens_total": self.num_recomputed_tokens,
            "preemption_lost_seconds_total": self.lost_seconds,
            "num_broken_protections_total": self.num_broken_protections,
        }
