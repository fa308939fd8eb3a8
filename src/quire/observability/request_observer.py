"""One request under the eyes of the front end: it arrives, computes, brings tokens, ends.

    arrived ........ started ........ first token ........ last token
            queue            prefill              decode
                     |------------- inference -------------|

Prefill is the request's own work and interference: what the engine computed for others meanwhile.
Owns the times of one request; what they add up to is in the metrics, and in the trace of the request if there is one.
The four times are the front end's: the engine's own, and what lies between the two (a socket, a busy event loop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.observability.tracing import RequestTrace

if TYPE_CHECKING:
    from quire.observability.metrics import ServerMetrics


class RequestObserver:
    """Follows one request from its arrival to its end."""

    __slots__ = (
        "_arrived",
        "_first",
        "_is_pooled",
        "_last",
        "_metrics",
        "_n",
        "_num_by_sequence",
        "_num_generated",
        "_num_prompt",
        "_share_of_others",
        "_started",
        "_trace",
        "is_finished",
    )

    def __init__(
        self,
        metrics: ServerMetrics,
        trace: RequestTrace | None,
        num_prompt_tokens: int,
        now: float,
        *,
        n: int = 1,
        is_pooled: bool = False,
    ) -> None:
        """`n`: its sequences. `is_pooled`: a vector comes and no token."""
        self._metrics = metrics
        self._trace = trace
        self._is_pooled = is_pooled
        self._n = n
        self._num_prompt = num_prompt_tokens
        self._num_generated = 0
        self._num_by_sequence: dict[int, int] = {}
        self._arrived = now
        self._started: float | None = None
        self._first: float | None = None
        # of prefill; None: nobody knows
        self._share_of_others: float | None = None
        self._last = now
        self.is_finished = False

    @property
    def _num_of_longest(self) -> int:
        return max(self._num_by_sequence.values(), default=0) if self._n > 1 else self._num_generated

    def started(self, num_cached_tokens: int, now: float) -> None:
        """It has left the queue: a first sequence of it computes, behind so many tokens that were there."""
        self._metrics.prompt_tokens_cached.add(num_cached_tokens)
        if self._started is None:
            self._started = now
            self._metrics.request_queue_time.observe(now - self._arrived)

    def interfered(self, share_of_others: float) -> None:
        """Of what the engine has computed since it began, so much was for others. Before its first token."""
        self._share_of_others = share_of_others

    def tokens(self, count: int, now: float, index: int = 0) -> None:
        """`count` tokens have arrived together; several tokens of one delivery share the time since the last."""
        if not count:
            return
        metrics = self._metrics
        if self._first is None:
            self._first = now
            metrics.time_to_first_token.observe(now - self._arrived)
            if self._started is not None:
                metrics.request_prefill_time.observe(now - self._started)
                if self._share_of_others is not None:
                    metrics.request_interference_time.observe((now - self._started) * self._share_of_others)
        else:
            metrics.inter_token_latency.observe((now - self._last) / count)
        self._num_generated += count
        if self._n > 1:
            self._num_by_sequence[index] = self._num_by_sequence.get(index, 0) + count
        self._last = now
        metrics.generation_tokens.add(count)

    def finished(self, reason: str | None, now: float) -> None:
        """The first call counts."""
        if self.is_finished:
            return
        self.is_finished = True
        metrics = self._metrics
        metrics.request_success.add(1, reason or "unknown")
        metrics.e2e_request_latency.observe(now - self._arrived)
        if not self._is_pooled:
            metrics.request_generation_tokens.observe(self._num_generated)
            metrics.request_max_num_generation_tokens.observe(self._num_of_longest)
        if self._started is not None:
            metrics.request_inference_time.observe(now - self._started)
        if self._first is not None:
            self._observe_tokens_after_the_first(self._last - self._first)
        if self._trace is not None:
            self._tell_trace(self._trace, reason, now)

    def _observe_tokens_after_the_first(self, seconds: float) -> None:
        self._metrics.request_decode_time.observe(seconds)
        most = self._num_of_longest
        if most > 1:
            self._metrics.request_time_per_output_token.observe(seconds / (most - 1))

    def times(self) -> dict[str, float]:
        """Its parts so far in milliseconds, by vLLM's names; what cannot be said yet is not there. The first token is
        counted from the start, and the speed as well, unless all that there is came with the start."""
        if self._started is None or self._first is None:
            return {}
        computed = self._last - self._started or self._last - self._arrived
        decoded = self._last - self._first
        times = {
            "queue_time_ms": 1e3 * (self._started - self._arrived),
            "time_to_first_token_ms": 1e3 * (self._first - self._started),
            "generation_time_ms": 1e3 * decoded,
        }
        if self._num_of_longest > 1:
            times["mean_itl_ms"] = 1e3 * decoded / (self._num_of_longest - 1)
        if computed > 0:
            times["tokens_per_second"] = self._num_generated / computed
        return times

    def _tell_trace(self, trace: RequestTrace, reason: str | None, now: float) -> None:
        started = self._started
        first = self._first
        trace.stage("queue", self._arrived, now if started is None else started)
        if started is not None:
            name = "vector" if self._is_pooled else "first token"
            trace.stage(name, started, now if first is None else first)
        if first is not None:
            trace.stage("generation", first, now)
        trace.count(self._num_prompt, self._num_generated, reason or "unknown")
