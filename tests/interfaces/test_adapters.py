"""Adapters by name, for engines that take the place of one that has died."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import EngineDeadError, EngineError
from quire.interfaces.adapters import Adapters


class Engine:
    """Loads what it is told at once, and dies of one."""

    def __init__(self, deadly: str = "", broken: str = "") -> None:
        self.names: list[str] = []
        self._deadly = deadly
        self._broken = broken

    async def control(self, name: str, args: dict[str, Any]) -> Any:
        if name == "load_adapter":
            if args["name"] == self._deadly:
                raise EngineDeadError("it has died")
            self.names.append(args["name"])
            return len(self.names)
        assert name == "adapter_state"
        if self.names[args["number"] - 1] == self._broken:
            raise EngineError("its files are gone")
        return "ready"


@pytest.fixture
def adapters() -> Adapters:
    modules = (("sql", "/a"), ("chat", "/b"), ("code", "/c"))
    worker = SimpleNamespace(max_loras=2)
    config: Any = SimpleNamespace(lora_modules=modules, worker=worker, is_own_name=lambda name: False)
    return Adapters(config)


def test_an_engine_that_dies_while_it_gets_them_loses_none(adapters: Adapters) -> None:
    async def main() -> None:
        await adapters.furnish(Engine(), is_new=True)
        with pytest.raises(EngineDeadError):
            await adapters.furnish(Engine(deadly="chat"), is_new=False)
        third = Engine()
        await adapters.furnish(third, is_new=False)
        assert third.names == ["sql", "chat", "code"]

    asyncio.run(main())


def test_one_that_cannot_be_read_any_more_is_left_out(adapters: Adapters) -> None:
    async def main() -> None:
        await adapters.furnish(Engine(), is_new=True)
        await adapters.furnish(Engine(broken="chat"), is_new=False)
        third = Engine()
        await adapters.furnish(third, is_new=False)
        assert third.names == ["sql", "code"]

    asyncio.run(main())
