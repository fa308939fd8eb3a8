"""Is an engine stalled? It is judged by progress: work, and nothing got done for too long.

An engine that has nothing to do is never stalled, unless a signal has stopped its process. One that loads is judged by
its beats, which only a process that was stopped fails to give. Time is counted in looks: whoever was stopped himself,
or a whole machine that slept, has missed looks and blames nobody for it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine_core.pulse import Pulse

# a look counts for no more than this
_MOST_SECONDS_A_LOOK = 1.0
# a step may take so many times as long as its tokens took when they were measured
_PATIENCE_WITH_TOKENS = 4.0
# A process that a signal has stopped gets on when another one says so, and mostly never.
LONGEST_STOP = 1.0
# One that has work, gets nothing done for so long and had less than this share of a processor meanwhile stands still.
_LONGEST_IDLE = 1.5
_IDLE_SHARE = 0.1
# Reading gigabytes may hold the interpreter for a while.
_PATIENCE_WITH_LOADING = 4.0


class StallJudge:
    """Follows one engine. `timeout` is in seconds; `seconds_per_token` is what its start has measured."""

    def __init__(self, timeout: float, seconds_per_token: float = 0.0) -> None:
        self._timeout = timeout
        self.seconds_per_token = seconds_per_token
        self._progress: tuple[int, ...] = ()
        self._still = 0.0
        self._stopped = 0.0
        self._last: float | None = None
        # (without progress, of the processor) at looks, the first one as long ago as idleness takes: a fresh engine
        # commits memory beside its steps, and that must not hide for long that they stand still
        self._used: deque[tuple[float, float]] = deque()
        # Long without progress, and nothing is computed either. It may yet go on, so nobody is ended for it.
        self.is_standing = False

    def look(
        self,
        now: float,
        pulse: Pulse,
        num_sent: int,
        *,
        is_stopped: bool = False,
        processor_seconds: float | None = None,
    ) -> str | None:
        """Why the engine is taken for stalled, or None. To be called several times a second."""
        passed = 0.0 if self._last is None else min(now - self._last, _MOST_SECONDS_A_LOOK)
        self._last = now
        self._stopped = self._stopped + passed if is_stopped else 0.0
        if self._stopped > LONGEST_STOP:
            return f"The engine stalled: a signal has stopped its process for {self._stopped:.1f} s."
        progress = (1, pulse.num_done) if pulse.is_serving else (0, pulse.beats)
        has_work = not pulse.is_serving or pulse.is_busy or num_sent > pulse.num_received
        if progress != self._progress or not has_work:
            self._progress = progress
            self._still = 0.0
            self._used.clear()
            self._note(processor_seconds)
            self.is_standing = False
            return None
        self._still += passed
        self._note(processor_seconds)
        self.is_standing = pulse.is_serving and self._is_idle(_LONGEST_IDLE + self._patience(pulse))
        if self._still < self._allowed(pulse):
            return None
        return self._reason(pulse, num_sent)

    def _note(self, processor_seconds: float | None) -> None:
        """None: nobody says."""
        if processor_seconds is not None:
            self._used.append((self._still, processor_seconds))

    def _is_idle(self, seconds: float) -> bool:
        """For so long, until now."""
        while len(self._used) > 1 and self._still - self._used[1][0] >= seconds:
            self._used.popleft()
        if not self._used:
            return False
        began, before = self._used[0]
        passed = self._still - began
        return passed >= seconds and self._used[-1][1] - before < _IDLE_SHARE * passed

    def _allowed(self, pulse: Pulse) -> float:
        if not pulse.is_serving:
            return self._timeout * _PATIENCE_WITH_LOADING
        return self._timeout + self._patience(pulse)

    def _patience(self, pulse: Pulse) -> float:
        """With the steps that are under way."""
        return _PATIENCE_WITH_TOKENS * pulse.num_tokens * self.seconds_per_token

    def _reason(self, pulse: Pulse, num_sent: int) -> str:
        still = f"no progress for {self._still:.1f} s"
        if not pulse.is_serving:
            return f"The engine stalled while it loaded: {still}."
        if num_sent > pulse.num_received:
            unread = num_sent - pulse.num_received
            return f"The engine stalled: {still}, {unread} messages wait to be read."
        last = f"the steps under way count as {pulse.num_tokens} tokens"
        return f"The engine stalled: {still}, after {pulse.num_done} messages and steps; {last}."
