"""What can be looked at from outside while the engine runs: its state, its blocks, its last decisions.

Control operations that change nothing and cost less than a millisecond each, because no step is decided meanwhile.
What is sent holds numbers only: no text, no token, no handle of anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from quire.engine_core.kv_cache_manager.block_map import STATES
from quire.engine_core.request import Request, Status
from quire.engine_core.scheduler.scheduler import Scheduler
from quire.errors import UserError
from quire.observability.recorded import sent_changes, sent_steps
from quire.observability.recorder import DecisionRecorder

# of each list that is shown
_MOST_REQUESTS = 64
_MOST_ENTRIES = 1000
# what the rates are about
_RATE_SECONDS = 5.0
_RATE_STEPS = 128
# for so long a block is shown as copied
_COPIED_SECONDS = 3.0


class Observation:
    """Reads a scheduler and its recorder."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        recorder = scheduler.recorder
        self._recorder = recorder if isinstance(recorder, DecisionRecorder) else None

    def operations(self) -> dict[str, Callable[..., Any]]:
        """By the names under which the core offers them."""
        return {
            "observe_state": self.state,
            "observe_blocks": self.blocks,
            "recent_decisions": self.decisions,
            "recording": self.recording,
        }

    # ------------------------------------------------------------------------------------------ now

    def state(self) -> dict[str, Any]:
        """Who runs, who waits and for what, where the memory is, and how fast it goes."""
        scheduler = self._scheduler
        running = scheduler.running.requests
        queues = scheduler.queues
        return {
            "is_recorded": self._recorder is not None,
            "now": self._recorder.clock() if self._recorder else 0.0,
            "step": self._recorder.step - 1 if self._recorder else 0,
            "num_running": len(running),
            "num_waiting": len(queues),
            "num_preempted": queues.num_preempted,
            "max_num_seqs": scheduler.rows.num_rows,
            "running": [_running(request) for request in running[:_MOST_REQUESTS]],
            "waiting": [self._waiting(request) for request in islice(queues.in_line(), _MOST_REQUESTS)],
            "memory": scheduler.memory(),
            "rates": self._rates(),
        }

    def blocks(self) -> dict[str, Any]:
        """The block map, and who is in swap space."""
        scheduler = self._scheduler
        swap = scheduler.manager.swap
        block_map = scheduler.manager.block_map(scheduler.running.living_sequences(), self._lately_copied())
        swapped = [request for request in scheduler.queues.all_preempted() if request.is_swapped]
        return {
            "num_blocks": block_map.num_blocks,
            "block_size": block_map.block_size,
            "states": block_map.states,
            "owners": block_map.owners,
            "num_holders": block_map.num_holders,
            "sequences": block_map.sequences,
            "num_sharing_requests": block_map.num_sharing_requests,
            "counts_by_state": dict(zip(STATES, block_map.counts, strict=True)),
            "waiting_for": scheduler.admission_control.waits(),
            "num_host_blocks": swap.num_blocks,
            "num_host_blocks_used": swap.num_used,
            "swapped": [(request.request_id, _num_host_blocks(request)) for request in swapped[:_MOST_REQUESTS]],
        }

    def _waiting(self, request: Request) -> dict[str, Any]:
        lacks, needed, there = self._scheduler.admission_control.why_waits(request)
        tokens = request.longest
        return {
            "request": request.request_id,
            "num_tokens": tokens,
            "has_run": request.status is Status.PREEMPTED,
            "is_swapped": request.is_swapped,
            "priority": request.priority,
            "waits_for": lacks,
            "needed": needed,
            "there": there,
        }

    def _lately_copied(self) -> list[int]:
        if self._recorder is None:
            return []
        since = self._recorder.clock() - _COPIED_SECONDS
        return [block for when, blocks in self._recorder.copies if when >= since for block in blocks]

    def _rates(self) -> dict[str, float]:
        """Of the last seconds."""
        nothing = {"steps_per_second": 0.0, "computed_tokens_per_second": 0.0, "seconds_per_step": 0.0}
        recorder = self._recorder
        if recorder is None:
            return nothing
        now = recorder.clock()
        steps = [one for one in recorder.steps.last(_RATE_STEPS) if one[1] >= now - _RATE_SECONDS]
        if not steps:
            return nothing
        # where more steps were made in the time than were read, it is the time of those
        seconds = _RATE_SECONDS if len(steps) < _RATE_STEPS else max(now - steps[0][1], 1e-9)
        num_tokens = sum(int(one[4].sum()) + len(one[4]) * recorder.num_more_of(one[0]) for one in steps)
        took = [recorder.end_of(step) - began for step, began, *_ in steps if recorder.end_of(step)]
        return {
            "steps_per_second": len(steps) / seconds,
            "computed_tokens_per_second": num_tokens / seconds,
            "seconds_per_step": sum(took) / len(took) if took else 0.0,
        }

    # ------------------------------------------------------------------------------------------ what was

    def decisions(self, since: int = 0, limit: int = 500) -> dict[str, Any]:
        """Decisions from number `since` on, oldest first; `next` is the number to go on with."""
        recorder = self._recorder
        if recorder is None:
            return {"now": 0.0, "began": 0.0, "first": 0, "next": 0, "decisions": []}
        ring = recorder.decisions
        # Of a reader who is far behind, the newest are what matters.
        start = max(since, ring.next_number - min(limit, _MOST_ENTRIES))
        start = max(start, ring.first_number)
        found = [(start + index, *one) for index, one in enumerate(ring.since(start, _MOST_ENTRIES))]
        return {
            "now": recorder.clock(),
            "began": recorder.began,
            "first": ring.first_number,
            "next": ring.next_number,
            "decisions": found,
        }

    def recording(self, part: str, since: int = 0, limit: int = _MOST_ENTRIES) -> dict[str, Any]:
        """A piece of what is recorded: steps, decisions or changes. Read again from `next` until nothing comes."""
        recorder = self._recorder
        if recorder is None:
            raise UserError("recorder_bytes=0: nothing is recorded. Start the engine with recorder_bytes above 0.")
        rings = {"steps": recorder.steps, "decisions": recorder.decisions, "changes": recorder.blocks}
        if part not in rings:
            raise UserError(f"part={part!r}: must be one of {', '.join(rings)}.")
        ring: Any = rings[part]
        start = max(since, ring.first_number)
        entries = ring.since(start, min(limit, _MOST_ENTRIES))
        manager = self._scheduler.manager
        return {
            "now": recorder.clock(),
            "next": start + len(entries),
            "end": ring.next_number,
            "num_blocks": manager.pool.num_blocks,
            "block_size": manager.block_size,
            "entries": self._sent(recorder, part, start, entries),
        }

    @staticmethod
    def _sent(recorder: DecisionRecorder, part: str, start: int, entries: list[Any]) -> list[Any]:
        if part == "steps":
            return sent_steps(entries, [(recorder.end_of(step), recorder.num_more_of(step)) for step, *_ in entries])
        if part == "changes":
            return sent_changes(entries)
        return [(start + index, *entry) for index, entry in enumerate(entries)]


def _running(request: Request) -> dict[str, Any]:
    sequences = request.sequences.values()
    return {
        "request": request.request_id,
        "num_sequences": len(request.sequences),
        "num_tokens": request.longest,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": max((one.num_computed_tokens for one in sequences), default=0),
        "num_blocks": sum(len(table) for one in sequences for table in one.block_tables),
        "priority": request.priority,
        "is_idle": request.waits_for_input,
    }


def _num_host_blocks(request: Request) -> int:
    """Counted once where its sequences share them."""
    tables = [table for sequence in request.sequences.values() for table in sequence.host_tables]
    return len({block for table in tables for block in table if block >= 0})
