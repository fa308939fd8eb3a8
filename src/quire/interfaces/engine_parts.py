"""What stands between the callers of an AsyncLLM and its engine, from the engine's first start on.

Owns what must outlive an engine that died: the numbers of requests, the names of what is pinned, the sessions.
Owns no link: the caller gives the engine that is to be brought to the state of the old one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.interfaces.adapters import Adapters
from quire.interfaces.embeddings import Embeddings
from quire.interfaces.engine_calls import EngineCalls, OfReplica, control
from quire.interfaces.pinned_prefixes import PinnedPrefixes
from quire.interfaces.session import Sessions
from quire.interfaces.setup import limits_of, request_maker
from quire.interfaces.structured_outputs import StructuredOutputs
from quire.interfaces.weights import WeightUpdates
from quire.messages import EngineReady
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.renderer import Renderer


class EngineParts:
    def __init__(self, config: EngineConfig, ready: EngineReady, renderer: Renderer, defaults: SamplingParams) -> None:
        self._config = config
        self._renderer = renderer
        self._is_new = True
        self.maker = request_maker(config, ready, renderer)
        self.structured = StructuredOutputs(renderer, self.maker.limits.vocab_size)
        self.prefixes = PinnedPrefixes(config, self.maker, renderer)
        self.adapters = Adapters(config)
        self.weights = WeightUpdates()
        self.sessions = Sessions(self.maker, renderer, defaults, self.structured, self.adapters)
        self.embeddings = Embeddings(config, self.maker)

    def engine_was_replaced(self, ready: EngineReady) -> None:
        """A new engine has taken the place of the one that these parts served."""
        # another program may have taken memory meanwhile
        self.maker.limits = limits_of(self._config, ready)
        self.structured.engine_was_replaced()
        self.sessions.engine_was_replaced()

    async def furnish(self, engine: EngineCalls) -> None:
        """Brings a fresh engine to where it was, or to where the configuration wants it."""
        await self.weights.bring_back(engine)
        await self.adapters.furnish(engine, is_new=self._is_new)
        if not self._is_new:
            await self.prefixes.pin_again(engine)
        elif self._config.pinned_prefixes is not None:
            await self.prefixes.pin_file(engine, self._config.pinned_prefixes)
        self._is_new = False

    def replica_was_lost(self) -> None:
        """One of several; nobody knows here which sessions it kept."""
        self.sessions.engine_was_replaced()

    async def furnish_replica(self, engine: EngineCalls, number: int) -> None:
        """Brings a fresh replica to where the others are, and lets it serve."""
        one = OfReplica(engine, number)
        async with self.weights.bringing_replica(one):
            await self.structured.tell_again(one)
            await self.adapters.furnish_replica(one, partial(control, engine, "replicas.serve", number=number))
        await self.prefixes.pin_again(engine)

    def close(self) -> None:
        self.structured.close()
        self._renderer.close()
