"""The model that a request names, with all that its endpoint needs to make an answer of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.interfaces.adapters import Adapter
from quire.interfaces.server.engine import ServedEngine
from quire.interfaces.text_threads import TextThreads
from quire.observability.metrics import ServerMetrics
from quire.renderer import Renderer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name, and the engine that computes it."""

    name: str
    engine: ServedEngine
    # what generation_config.json recommends
    defaults: dict[str, Any]
    metrics: ServerMetrics
    text_threads: TextThreads
    # the end of an answer must not wait for the long texts of others
    count_threads: TextThreads
    # it is the model with this on top
    adapter: Adapter | None = None

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def max_model_len(self) -> int:
        """What the engine found room for, which may be less than what was asked."""
        return self.engine.ready.max_model_len
