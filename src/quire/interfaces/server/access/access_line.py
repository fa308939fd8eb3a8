"""The line that one HTTP request leaves in the log: who asked, for what, how many tokens, and how long each part took.

Hears what a trace hears, and tells the trace of the request if there is one. Nothing of a prompt, an answer or a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.observability.tracing import RequestTrace

_MODEL = "gen_ai.request.model"
# a trace's names of the parts of a prompt's way through the engine
_SECONDS = {"queue": "queue_seconds", "first token": "prefill_seconds", "vector": "prefill_seconds"}


class AccessLine:
    def __init__(self, trace: RequestTrace | None) -> None:
        self._trace = trace
        self._num_prompts = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._model = ""
        # of several prompts the longest
        self._seconds: dict[str, float] = {}

    def describe(self, attributes: Mapping[str, Any]) -> None:
        self._model = attributes.get(_MODEL, "")
        if self._trace is not None:
            self._trace.describe(attributes)

    def stage(self, name: str, start: float, end: float) -> None:
        field = _SECONDS.get(name)
        if field is not None:
            self._seconds[field] = max(self._seconds.get(field, 0.0), end - start)
        if self._trace is not None:
            self._trace.stage(name, start, end)

    def count(self, num_prompt_tokens: int, num_generated_tokens: int, finish_reason: str) -> None:
        self._num_prompts += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_generated_tokens += num_generated_tokens
        if self._trace is not None:
            self._trace.count(num_prompt_tokens, num_generated_tokens, finish_reason)

    def end(self, route: str, status: int) -> None:
        if self._trace is not None:
            self._trace.end(route, status)

    def fields(self) -> dict[str, Any]:
        """Of what was computed; nothing, where the engine was not asked."""
        if not self._num_prompts:
            return {}
        counts = {"prompt_tokens": self._num_prompt_tokens, "generated_tokens": self._num_generated_tokens}
        return {"model": self._model, **counts, **{name: round(value, 6) for name, value in self._seconds.items()}}

    def words(self) -> str:
        if not self._num_prompts:
            return ""
        said = [f"{self._num_prompt_tokens} tokens in", f"{self._num_generated_tokens} out"]
        said += [f"{name.removesuffix('_seconds')} {value:.3f} s" for name, value in self._seconds.items()]
        return f" ({', '.join(said)})"
