"""Adapters (LoRA) by name: loading, unloading, and the number by which the core knows one.

The core owns who is loaded; several processes may serve one core, so that a name which is not known here is asked for
there. Owns what a new engine has to load again after the old one has died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from quire.config import EngineConfig
from quire.config.lora import fault_of_name
from quire.errors import OptionError, RequestError
from quire.interfaces.engine_calls import EngineCalls, control
from quire.lora_request import LoRARequest

logger = logging.getLogger(__name__)
NAME_IS_TAKEN = "adapter_exists"
NOT_FOUND = "adapter_not_found"
_STATISTICS = (
    "num_adapters_loaded",
    "num_adapters_in_slots",
    "adapter_bytes",
    "num_adapter_slot_fills_total",
    "num_adapter_evictions_total",
)
# between two looks at an adapter that is being read beside the steps
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Adapter:
    """One that requests may name."""

    name: str
    number: int
    path: str


class Adapters:
    """Those of one engine, and of those that take its place."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._by_name: dict[str, Adapter] = {}
        # one change at a time
        self._lock = asyncio.Lock()

    async def furnish(self, engine: EngineCalls, *, is_new: bool) -> None:
        """Brings a fresh engine to where it was, or to where the configuration wants it."""
        before = self._by_name
        again = [(adapter.name, adapter.path) for adapter in before.values()]
        self._by_name = {}
        try:
            for name, path in self._config.lora_modules if is_new else again:
                await self._load_at_start(engine, name, path, is_new=is_new)
        except BaseException:
            # This engine has died as well, or its start was broken off: the next one is to have all of them.
            self._by_name = before
            raise

    async def _load_at_start(self, engine: EngineCalls, name: str, path: str, *, is_new: bool) -> None:
        try:
            await self.load(engine, name, path)
        except RequestError as error:
            if is_new:
                raise OptionError(f"lora_modules: {error}") from error
            logger.error("an adapter is not there any more: %s", error)

    async def furnish_replica(self, engine: EngineCalls, serve: Callable[[], Awaitable[Any]]) -> None:
        """Loads into an engine that joins others what those have, under the same numbers, and lets it serve before
        anything changes."""
        async with self._lock:
            for adapter in self._by_name.values():
                where = str(Path(adapter.path).absolute())
                await control(engine, "load_adapter", name=adapter.name, path=where, number=adapter.number)
                await self._until_ready(engine, adapter.number)
            await serve()

    async def all(self, engine: EngineCalls) -> list[Adapter]:
        """In the order in which they were loaded."""
        if self._config.worker.max_loras:
            entries = await control(engine, "list_adapters")
            self._by_name = {entry["name"]: Adapter(**entry) for entry in entries}
        return list(self._by_name.values())

    async def statistics(self, engine: EngineCalls) -> dict[str, float]:
        """Of the worker, which answers between two steps: it is asked only where there are slots."""
        if not self._config.worker.max_loras:
            return {}
        worker = await control(engine, "worker.statistics")
        return {name: worker.get(name, 0.0) for name in _STATISTICS}

    async def find(self, engine: EngineCalls, name: str) -> Adapter | None:
        """The one of this name that new requests use."""
        if name not in self._by_name or self._config.engine_process is not False:
            # another process may have loaded or unloaded it
            await self.all(engine)
        return self._by_name.get(name)

    async def load(self, engine: EngineCalls, name: str, path: str, *, in_place: bool = False) -> Adapter:
        """Reads the adapter while requests go on. `in_place`: a name that is taken gets another version; requests that
        run go on with the old one."""
        if (fault := fault_of_name(name)) is not None:
            raise RequestError(fault, param="lora_name")
        if self._config.is_own_name(name):
            raise RequestError(f"{name}: is the name of the model. Choose another one.", param="lora_name")
        async with self._lock:
            where = str(Path(path).absolute())
            number = await self._begin(engine, name=name, path=where, in_place=in_place)
            if number is None:
                raise RequestError(
                    f"The adapter {name!r} has already been loaded, or is being loaded. Unload it first, or give "
                    "load_inplace when it is loaded.",
                    param="lora_name",
                    code=NAME_IS_TAKEN,
                )
            await self._until_ready(engine, number)
            self._by_name[name] = Adapter(name, number, path)
            return self._by_name[name]

    async def _begin(self, engine: EngineCalls, **arguments: Any) -> int | None:
        answer = asyncio.ensure_future(control(engine, "load_adapter", **arguments))
        try:
            return cast(int | None, await asyncio.shield(answer))
        except asyncio.CancelledError:
            # its number is on the way; without it nobody could take it back
            if (number := await answer) is not None:
                await control(engine, "unload_adapter", number=number)
            raise

    async def _until_ready(self, engine: EngineCalls, number: int) -> None:
        try:
            while await control(engine, "adapter_state", number=number) == "loading":
                await asyncio.sleep(_LOOK_SECONDS)
        except asyncio.CancelledError:
            # nobody waits for it any more, and nobody knows its number
            await asyncio.shield(control(engine, "unload_adapter", number=number))
            raise
        except RequestError as error:
            error.param = "lora_path"
            raise

    async def unload(self, engine: EngineCalls, name: str) -> Adapter:
        """New requests do not find it; those that run go on, and then its memory is given back."""
        async with self._lock:
            adapter = await self.find(engine, name)
            if adapter is None:
                raise RequestError(f"The adapter {name[:100]!r} is not loaded.", param="lora_name", code=NOT_FOUND)
            self._by_name.pop(name, None)
            await control(engine, "unload_adapter", number=adapter.number)
            return adapter

    async def number_of(self, engine: EngineCalls, request: LoRARequest | Adapter | None) -> int:
        """0 for none. One that nobody has named yet is loaded."""
        if request is None:
            return 0
        if isinstance(request, Adapter):
            return request.number
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request={str(request)[:80]!r}: must be a LoRARequest(name, id, path).", param="lora_request"
            )
        while True:
            if (adapter := await self.find(engine, request.lora_name)) is not None:
                return _same(adapter, request).number
            try:
                return (await self.load(engine, request.lora_name, request.lora_path)).number
            except RequestError as error:
                if error.code != NAME_IS_TAKEN:
                    raise
            # another process loads it
            await asyncio.sleep(_LOOK_SECONDS)


def _same(adapter: Adapter, request: LoRARequest) -> Adapter:
    if Path(adapter.path).absolute() != Path(request.lora_path).absolute():
        raise RequestError(
            f"lora_request: the adapter {request.lora_name!r} was loaded from {adapter.path}, not from "
            f"{request.lora_path}. Choose another name, or unload it first.",
            param="lora_request",
        )
    return adapter
