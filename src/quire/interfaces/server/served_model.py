"""The models that requests may name, each with all that an endpoint needs to make an answer of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config import EngineConfig
from quire.interfaces.adapters import Adapter
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.image_rendering import ImageRendering
from quire.interfaces.server.wire.errors import ApiError, unavailable
from quire.interfaces.setup import default_sampling_params
from quire.interfaces.text_threads import TextThreads
from quire.observability.metrics import ServerMetrics
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

# adapters in an error
_NUM_NAMED = 8


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name, and the engine that computes it."""

    name: str
    engine: AsyncLLM
    # what generation_config.json recommends
    defaults: dict[str, Any]
    metrics: ServerMetrics
    text_threads: TextThreads
    # the end of an answer must not wait for the long texts of others
    count_threads: TextThreads
    images: ImageRendering
    # it is the model with this on top
    adapter: Adapter | None = None

    @property
    def renderer(self) -> Renderer:
        return self.engine.renderer

    @property
    def max_model_len(self) -> int:
        """What the engine found room for, which may be less than what was asked."""
        return self.engine.ready.max_model_len


class Models:
    """The model that is served, and its adapters."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.text_threads = TextThreads()
        self.count_threads = TextThreads(1)
        self.created = int(time.time())
        self._own: ServedModel | None = None

    def serve(self, engine: AsyncLLM) -> None:
        name = engine.config.served_model_name
        defaults = _generation_defaults(engine.config)
        images = ImageRendering(engine.config.images)
        self._own = ServedModel(name, engine, defaults, self._metrics, self.text_threads, self.count_threads, images)

    @property
    def own(self) -> ServedModel:
        if self._own is None:
            raise unavailable("Not ready: the model is still loading.")
        return self._own

    def only(self, name: str | None) -> ServedModel:
        """For what is of the model alone."""
        if name is not None and name != self.own.name:
            raise self._unknown(name)
        return self.own

    async def named(self, name: str | None) -> ServedModel:
        """The one that a request names, which may be an adapter."""
        own = self.own
        if name is None or name == own.name or not own.engine.config.worker.max_loras:
            return self.only(name)
        adapter = await own.engine.find_adapter(name)
        if adapter is None:
            raise self._unknown(name, [one.name for one in await own.engine.adapters()])
        return replace(own, name=name, adapter=adapter)

    def _unknown(self, name: str, adapters: Sequence[str] = ()) -> ApiError:
        names = ", ".join(f"`{one}`" for one in (self.own.name, *adapters[:_NUM_NAMED]))
        rest = len(adapters) - _NUM_NAMED
        more = f" and {rest} more: GET /v1/models lists them" if rest > 0 else ""
        text = f"The model `{name[:200]}` does not exist. This server has {names}{more}."
        return ApiError(404, text, param="model", code="model_not_found")


def _generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """What the model's authors recommend, as far as it differs from SamplingParams' own defaults."""
    recommended = default_sampling_params(config)
    plain = SamplingParams()
    return {
        name: getattr(recommended, name)
        for name in recommended.__struct_fields__
        if getattr(recommended, name) != getattr(plain, name)
    }
