"""Models that are loaded when a request names them, beside the one that a server was started with.

Owns which of them are in memory. Each is an engine in a process of its own. One is loaded at a time; those that nobody
used for longest leave when there is no room, and none leaves that a request holds. However requests change between
models, each load is worth a stay of some seconds, so a storm of them waits and does not turn the disk. A load that
hangs keeps its room until its time is over, and after a while not the others from theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.config.memory_budget import engine_bytes
from quire.errors import OptionError, QuireError
from quire.interfaces.async_llm import AsyncLLM
from quire.interfaces.server.restart_policy import RestartPolicy
from quire.interfaces.server.wire.errors import ApiError, rate_limited, unavailable
from quire.interfaces.setup import configured

if TYPE_CHECKING:
    from quire.renderer import Renderer

logger = logging.getLogger("quire.server")

# of each; beside its weights, its program and its largest step
KV_CACHE_BYTES = 512 * 2**20
# A model that was loaded stays for so long, whoever waits.
_LEAST_STAY_SECONDS = 5.0
# A request waits for room, and for those that are loaded before its own.
_PATIENCE_SECONDS = 120.0
# For so long one load keeps others from beginning: it is quicker alone.
_TURN_SECONDS = 30.0
# And one whose own load is on its way, however many come before it.
_LONGEST_WAIT_SECONDS = 600.0
_MOST_WAITING = 256
# One that could not be loaded is not tried again for so long, and longer each time.
_FIRST_PAUSE_SECONDS = 5.0
_MOST_DOUBLINGS = 6
_LOOK_SECONDS = 0.1

# A filter that one model has would be none if another model answered without it.
_OF_REQUESTS = ("hooks", "hook_timeout", "hook_on_failure", "hook_process", "max_logprobs", "tenant_cache_share")

# What a request holds while it uses an engine; the reference is weak, so that nobody has to give it back.
Wrap = Callable[[str, AsyncLLM], Any]
MakeEngine = Callable[[EngineConfig], AsyncLLM]


@dataclass(slots=True)
class _Entry:
    """One model, in memory or not."""

    config: EngineConfig
    keep_alive: float
    restarts: RestartPolicy
    # in memory
    num_bytes: int
    engine: AsyncLLM | None = None
    loading: asyncio.Task[None] | None = None
    holders: list[weakref.ref[Any]] = field(default_factory=list)
    loaded_at: float = 0.0
    used_at: float = 0.0
    num_failures: int = 0
    failed_at: float = 0.0
    # engines of it that have room, from the beginning of a load to the end of a process
    num_places: int = 0
    # its last engine died, and none was started since
    is_lost: bool = False
    # for whoever asks what it can, while it is not in memory
    renderer: Renderer | None = None

    @property
    def name(self) -> str:
        return self.config.served_model_name

    @property
    def is_held(self) -> bool:
        self.holders = [holder for holder in self.holders if holder() is not None]
        return bool(self.holders)


def configs_of(names: Sequence[str], memory: int) -> list[EngineConfig]:
    """Of these models, which are downloaded where they are not here. Raises UserError for one that can never work."""
    configs = [configured({"model": name, "kv_cache_memory_bytes": KV_CACHE_BYTES}) for name in names]
    configs = [_named_shortly(config, configs) for config in configs]
    for config in configs:
        if (needed := engine_bytes(config)) > memory:
            text = f"needs {_gib(needed)}, further_models_memory is {_gib(memory)}. Raise it, or leave the model out."
            raise OptionError(f"further_models={config.served_model_name}: {text}")
    return configs


def _named_shortly(config: EngineConfig, beside: Sequence[EngineConfig]) -> EngineConfig:
    """Where a folder lies is nobody's business: of its path as few last parts as tell it from the others."""
    own = config.served_model_name
    if not os.path.exists(own):
        return config
    parts = Path(os.path.abspath(own)).parts
    others = [Path(os.path.abspath(other.served_model_name)).parts for other in beside if other is not config]
    length = 1
    while any(other[-length:] == parts[-length:] for other in others) and length < len(parts):
        length += 1
    # in requests the path will do as well
    further = (own, *config.further_model_names)
    return replace(config, served_model_names=("/".join(parts[-length:]),), further_model_names=further)


def _start(config: EngineConfig) -> AsyncLLM:
    return AsyncLLM.from_config(config)


class FurtherModels:
    """By their names, within `memory` bytes together."""

    def __init__(
        self,
        configs: Sequence[EngineConfig],
        memory: int,
        keep_alive: float,
        make: MakeEngine | None = None,
        clock: Callable[[], float] = time.monotonic,
        check_place: Callable[[], None] = lambda: None,
        *,
        load_seconds: float = 300.0,
        restarts: tuple[int, float] = (3, 60.0),
        size_of: Callable[[EngineConfig], int] = engine_bytes,
    ) -> None:
        """`make` starts one; an AsyncLLM of its own by itself. `check_place` raises for a request that would find no
        place once its model is there. `restarts`: how often an engine that died is started again, within so many
        seconds. `size_of`: what one takes in memory."""
        self._entries = {
            config.served_model_name: _Entry(config, keep_alive, RestartPolicy(*restarts), size_of(config))
            for config in configs
        }
        self._load_seconds = load_seconds
        self._memory = memory
        self._keep_alive = keep_alive
        self._make = make or _start
        self._clock = clock
        self._check_place = check_place
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._num_waiting = 0
        self._ticking: asyncio.Task[None] | None = None

    def serve(self, first: EngineConfig) -> None:
        """Beside this one: what was said of all requests to the server holds for these models, too."""
        of_requests = {name: getattr(first, name) for name in _OF_REQUESTS}
        for entry in self._entries.values():
            own_tokens = entry.config.images.max_num_encoder_tokens
            images = replace(first.images, max_num_encoder_tokens=own_tokens)
            entry.config = replace(entry.config, images=images, **of_requests)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def find(self, name: str) -> str | None:
        """What a model is called here that a request calls so."""
        return next((own for own, entry in self._entries.items() if entry.config.is_own_name(name)), None)

    def config(self, name: str) -> EngineConfig:
        return self._entries[name].config

    async def renderer(self, name: str) -> Renderer:
        """Of one that may not be in memory. Read once."""
        from quire.renderer import Renderer

        entry = self._entries[name]
        if entry.engine is not None:
            return entry.engine.renderer
        async with self._reading:
            if entry.renderer is None:
                entry.renderer = await asyncio.to_thread(Renderer.from_config, entry.config)
        return entry.renderer

    @property
    def loaded(self) -> dict[str, AsyncLLM]:
        """Those in memory, by name."""
        return {name: entry.engine for name, entry in self._entries.items() if entry.engine is not None}

    def seconds_left(self, name: str) -> float:
        """How long one in memory stays if nobody asks for it."""
        entry = self._entries[name]
        return max(0.0, entry.used_at + entry.keep_alive - self._clock())

    async def get(self, name: str, wrap: Wrap) -> Any:
        """What `wrap` makes of the engine, which stays as long as somebody holds that. Raises 503, with the reason,
        where the model cannot be had now."""
        entry = self._entries[name]
        while entry.engine is None or entry.engine.dead_reason is not None:
            self._check_place()
            if entry.engine is not None:
                entry.is_lost = True
                # a client that leaves does not leave it half ended
                await asyncio.shield(self._unload(entry, "its engine died"))
                continue
            if entry.loading is None:
                self._check_may_try(entry)
                entry.loading = asyncio.ensure_future(self._load(entry, self._pause_of(entry)))
                entry.loading.add_done_callback(lambda task: _forget(entry, task))
            await self._loaded(entry)
        entry.used_at = self._clock()
        held = wrap(name, entry.engine)
        entry.holders.append(weakref.ref(held))
        return held

    def keep(self, name: str, seconds: float) -> None:
        """From now on, without requests; 0: as soon as nobody holds it. Negative: for ever. Says nothing of one that
        is not in memory."""
        entry = self._entries[name]
        if entry.engine is not None:
            entry.keep_alive = float("inf") if seconds < 0 else seconds

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        loading = [entry.loading for entry in self._entries.values() if entry.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for entry in self._entries.values():
            await self._unload(entry, "the server ends")

    # ------------------------------------------------------------------------------------------ coming and going

    async def _loaded(self, entry: _Entry) -> None:
        """Waits with the others for the load that runs. Each holds its request in memory, so there are only so many."""
        assert entry.loading is not None
        if self._num_waiting >= _MOST_WAITING:
            raise rate_limited(f"{_MOST_WAITING} requests wait for models to be loaded already.", 5)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(_LONGEST_WAIT_SECONDS):
                # a client that leaves takes nothing away from the others that wait
                await asyncio.shield(entry.loading)
        except TimeoutError:
            text = f"The model `{entry.name}` was not loaded within {_LONGEST_WAIT_SECONDS:g} seconds."
            raise unavailable(text) from None
        finally:
            self._num_waiting -= 1

    def _check_may_try(self, entry: _Entry) -> None:
        pause = _FIRST_PAUSE_SECONDS * 2.0 ** min(entry.num_failures - 1, _MOST_DOUBLINGS)
        left = entry.failed_at + pause - self._clock()
        if entry.num_failures and left > 0:
            raise _not_loaded(entry, left)

    def _pause_of(self, entry: _Entry) -> float:
        """Before its next load, which is counted where its last engine died."""
        if not entry.is_lost:
            return 0.0
        pause = entry.restarts.pause(self._clock())
        if pause is None:
            text = f"The engine of `{entry.name}` died, and so did those after it: more than {entry.restarts}."
            raise unavailable(text, {"retry-after": str(round(_FIRST_PAUSE_SECONDS))})
        entry.is_lost = False
        return pause

    async def _load(self, entry: _Entry, pause: float) -> None:
        if self._ticking is None:
            self._ticking = asyncio.ensure_future(self._tick())
        await asyncio.sleep(pause)
        async with self._lock:
            logger.info("%s is loaded", entry.name)
            await self._make_room(entry)
            starting = asyncio.ensure_future(self._begin(entry))
            try:
                await asyncio.wait({starting}, timeout=_TURN_SECONDS)
            except asyncio.CancelledError:
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                raise
        await starting

    async def _begin(self, entry: _Entry) -> None:
        """In the room that it has got."""
        engine: AsyncLLM | None = None
        try:
            engine = self._make(entry.config)
            async with asyncio.timeout(self._load_seconds):
                await engine.start()
        except BaseException as error:
            if engine is not None:
                await asyncio.to_thread(engine.shutdown)
            entry.num_places -= 1
            if not isinstance(error, Exception):
                raise
            self._failed(entry, error)
            raise _not_loaded(entry, _FIRST_PAUSE_SECONDS) from error
        entry.num_failures = 0
        entry.engine = engine
        entry.loaded_at = entry.used_at = self._clock()

    def _failed(self, entry: _Entry, error: Exception) -> None:
        entry.num_failures += 1
        entry.failed_at = self._clock()
        # of one that was not foreseen, the place as well
        place = None if isinstance(error, (QuireError, OSError, TimeoutError)) else error
        said = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            said = f"it took more than {self._load_seconds:g} seconds (further_models_load_timeout)"
        logger.error("%s could not be loaded: %s", entry.name, said, exc_info=place)

    async def _make_room(self, entry: _Entry) -> None:
        """And takes it."""
        end = self._clock() + _PATIENCE_SECONDS
        while entry.num_bytes + sum(one.num_places * one.num_bytes for one in self._entries.values()) > self._memory:
            idle = [one for one in self._entries.values() if self._has_stayed(one)]
            if idle:
                await self._unload(min(idle, key=lambda one: one.used_at), "another model needs its room")
            elif self._clock() >= end:
                raise unavailable(f"The models in memory are in use, and there is no room for `{entry.name}`.")
            else:
                await asyncio.sleep(_LOOK_SECONDS)
        entry.num_places += 1

    def _has_stayed(self, entry: _Entry) -> bool:
        """It may leave."""
        is_idle = entry.engine is not None and not entry.is_held
        return is_idle and self._clock() - entry.loaded_at >= _LEAST_STAY_SECONDS

    async def _unload(self, entry: _Entry, why: str) -> None:
        engine = entry.engine
        if engine is None:
            return
        entry.engine = None
        entry.keep_alive = self._keep_alive
        logger.info("%s leaves memory: %s", entry.name, why)
        try:
            await asyncio.to_thread(engine.shutdown)
        finally:
            entry.num_places -= 1

    async def _tick(self) -> None:
        """For ever: who was not used for as long as it is kept leaves."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for entry in self._entries.values():
                if entry.engine is not None and entry.is_held:
                    entry.used_at = self._clock()
            if self._lock.locked():
                # whoever loads one makes room as well
                continue
            # none is loaded before the memory of those that leave is free
            async with self._lock:
                for entry in self._entries.values():
                    if self._has_stayed(entry) and self.seconds_left(entry.name) <= 0:
                        await self._unload(entry, "nobody used it")


def _forget(entry: _Entry, task: asyncio.Task[None]) -> None:
    entry.loading = None
    if not task.cancelled():
        # whoever waited was told; there may be nobody left
        task.exception()


def _not_loaded(entry: _Entry, seconds: float) -> ApiError:
    # why may name files of this machine
    text = f"The model `{entry.name}` could not be loaded now. The server's log says why."
    return unavailable(text, {"retry-after": str(max(1, round(seconds)))})


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
