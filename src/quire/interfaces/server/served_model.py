"""The models that requests may name, each with all that an endpoint needs to make an answer of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from quire.config import EngineConfig
from quire.config.images import MOST_OPEN_BYTES
from quire.interfaces.adapters import Adapter
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.image_rendering import ImageRendering
from quire.interfaces.server.further_models import FurtherModels
from quire.interfaces.server.wire.errors import ApiError, rate_limited, unavailable
from quire.interfaces.setup import default_sampling_params
from quire.interfaces.text_threads import TextThreads
from quire.observability.instruments import Counter
from quire.observability.metrics import ServerMetrics
from quire.renderer import Renderer
from quire.sampling_params import SamplingParams

# adapters in an error
_NUM_NAMED = 8
# of a name that only a pattern knows: it stands in every event of the answer
_MOST_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True, weakref_slot=True)
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
    # for the chat template, unless a request says otherwise
    template_kwargs: Mapping[str, Any]
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

    def __init__(
        self,
        metrics: ServerMetrics,
        patterns: Sequence[str] = (),
        further: FurtherModels | None = None,
        *,
        num_processes: int = 1,
        template_kwargs: Mapping[str, Any] | None = None,
        client: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`patterns`: of names by which the model is meant as well, such as claude-*. `further`: those that are loaded
        when they are asked for. `num_processes`: that answer for this engine, each with its part of what images may
        take. `template_kwargs`: see ServedModel. `client`: the name of who asks now, if that is known."""
        self._client = client
        self._template_kwargs = template_kwargs or {}
        self._most_image_bytes = MOST_OPEN_BYTES // num_processes
        self._metrics = metrics
        self.further = further or FurtherModels((), 0, 0.0)
        self._patterns = patterns
        self.text_threads = TextThreads()
        self.count_threads = TextThreads(1)
        self.created = int(time.time())
        self._own: ServedModel | None = None
        self._further_served: dict[str, ServedModel] = {}

    def serve(self, engine: AsyncLLM) -> None:
        self._own = self._served(engine.config.served_model_name, engine)
        self.further.serve(engine.config)

    def _served(self, name: str, engine: AsyncLLM) -> ServedModel:
        defaults = generation_defaults(engine.config)
        check_room = partial(_check_image_room, engine, self._most_image_bytes, self._metrics.rejected)
        images = ImageRendering(engine.config.images, check_room=check_room, client=self._client)
        threads = (self.text_threads, self.count_threads)
        return ServedModel(name, engine, defaults, self._metrics, *threads, images, self._template_kwargs)

    def _held(self, name: str, engine: AsyncLLM) -> ServedModel:
        """A copy for one request, which tells by its life how long the engine is needed."""
        served = self._further_served.get(name)
        if served is None or served.engine is not engine:
            served = self._further_served[name] = self._served(name, engine)
        return replace(served)

    @property
    def own(self) -> ServedModel:
        if self._own is None:
            raise unavailable("Not ready: the model is still loading.")
        return self._own

    def only(self, name: str | None) -> ServedModel:
        """For what is of the model alone."""
        if name is None or self._is_own(name):
            return self.own
        raise self._unknown(name)

    async def named(self, name: str | None) -> ServedModel:
        """The one that a request names, which may be an adapter."""
        own = self.own
        if name is None or name == own.name:
            return own
        if (found := self.further.find(name)) is not None:
            further: ServedModel = await self.further.get(found, self._held)
            return further
        if not own.engine.config.worker.max_loras:
            return self.only(name)
        adapter = await own.engine.find_adapter(name)
        if adapter is not None:
            return replace(own, name=name, adapter=adapter)
        if self._is_own(name):
            return own
        raise self._unknown(name, [one.name for one in await own.engine.adapters()])

    def _is_own(self, name: str) -> bool:
        if self.own.engine.config.is_own_name(name):
            return True
        return len(name) <= _MOST_NAME_CHARACTERS and any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _unknown(self, name: str, adapters: Sequence[str] = ()) -> ApiError:
        names = ", ".join(f"`{one}`" for one in (self.own.name, *self.further.names, *adapters[:_NUM_NAMED]))
        rest = len(adapters) - _NUM_NAMED
        more = f" and {rest} more: GET /v1/models lists them" if rest > 0 else ""
        text = f"The model `{name[:200]}` does not exist. This server has {names}{more}."
        return ApiError(404, text, param="model", code="model_not_found")


def _check_image_room(engine: AsyncLLM, most: int, rejections: Counter) -> None:
    if (num_bytes := engine.num_image_bytes) >= most:
        text = (
            f"The images of the requests that this server has take {num_bytes >> 20} MiB, and at most "
            f"{most >> 20} MiB are kept. The request was not started. Send it again after the time in "
            "Retry-After."
        )
        rejections.add(1, "images")
        raise rate_limited(text, 1)


def generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """What the model's authors recommend, as far as it differs from SamplingParams' own defaults."""
    recommended = default_sampling_params(config)
    plain = SamplingParams()
    return {
        name: getattr(recommended, name)
        for name in recommended.__struct_fields__
        if getattr(recommended, name) != getattr(plain, name)
    }
