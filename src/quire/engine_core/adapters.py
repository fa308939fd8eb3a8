"""Which adapters (LoRA) the engine has: names, numbers, and when one that was unloaded may really go.

A number is given once and never again, so that blocks and rows of an older version are never taken for those of a newer
one. Loading goes on in the worker beside the steps: `load` begins it, `state` says when it is done. An adapter that is
unloaded takes no new request, and leaves the worker when its last request has ended. Several front ends may load at
the same time: a name has one adapter, and while it is being loaded one more. Called by EngineCore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.errors import UserError

# (operation of the worker, its arguments) -> result
WorkerControl = Callable[[str, dict[str, Any]], Any]


@dataclass
class _Adapter:
    name: str
    path: str
    is_ready: bool = False
    # why it could not be loaded, until whoever began it has been told
    error: str | None = None


class EngineAdapters:
    """The registry. `loaded` holds the numbers that requests may name."""

    def __init__(self, control: WorkerControl, most: int) -> None:
        """At most so many in memory; 0: the engine has no slots for any."""
        self._control = control
        self._most = most
        self._adapters: dict[int, _Adapter] = {}
        # no new request may name them
        self.leaving: set[int] = set()
        self._last_number = 0
        self.loaded: set[int] = set()
        # of those: what tells an adapter from all others, in any engine
        self.contents: dict[int, bytes] = {}

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {
            "load_adapter": self.load,
            "adapter_state": self.state,
            "unload_adapter": self.unload,
            "list_adapters": self.all,
        }

    def load(self, name: str, path: str, in_place: bool = False, number: int | None = None) -> int | None:
        """Begins to load; the number by which requests name it, once `state` says that it is ready. None if the name is
        taken: by one that is loaded, unless this one takes its place, or by one that is being loaded. `number`: a free
        one, of a client that has several engines, where it must be the same."""
        if not self._most:
            raise UserError("This engine was started without adapters. Start it with enable_lora=True (--enable-lora).")
        self._look()
        if any(one.name == name and not (one.is_ready and in_place) for one in self._staying()):
            return None
        num_held = sum(one.error is None for one in self._adapters.values())
        if num_held >= self._most:
            raise UserError(
                f"{num_held} adapters are in memory, the most that max_cpu_loras allows. Unload one, or "
                "start with a greater max_cpu_loras."
            )
        if number is None:
            number = self._last_number + 1
        self._last_number = max(self._last_number, number)
        self._adapters[number] = _Adapter(name, path)
        self._control("load_adapter", {"number": number, "path": path})
        return number

    def state(self, number: int) -> str:
        """loading or ready. Raises what was wrong with its files, and forgets it then."""
        adapter = self._adapters.get(number)
        if adapter is None:
            raise UserError("The adapter is not loaded.")
        self._look_at(number, adapter)
        if adapter.error is not None:
            self._drop(number)
            raise UserError(f"{adapter.name}: {adapter.error}")
        return "ready" if adapter.is_ready else "loading"

    def unload(self, number: int) -> bool:
        """No new request may name it from now on; those that run go on. Whether there was one."""
        if number not in self._adapters or number in self.leaving:
            return False
        self.loaded.discard(number)
        self.leaving.add(number)
        return True

    def all(self) -> list[dict[str, Any]]:
        """Those that requests may name, in the order in which they were loaded."""
        self._look()
        return [
            {"number": number, "name": adapter.name, "path": adapter.path}
            for number, adapter in self._adapters.items()
            if number in self.loaded
        ]

    def name_of(self, number: int) -> str | None:
        adapter = self._adapters.get(number)
        return None if adapter is None else adapter.name

    def _staying(self) -> list[_Adapter]:
        """Those that nobody has unloaded, and that did not fail."""
        return [one for number, one in self._adapters.items() if number not in self.leaving and one.error is None]

    def _look(self) -> None:
        """At all that are being loaded: whoever began it may have died, and does not ask any more."""
        for number, adapter in list(self._adapters.items()):
            self._look_at(number, adapter)

    def _look_at(self, number: int, adapter: _Adapter) -> None:
        if adapter.is_ready or adapter.error is not None:
            return
        answer = self._control("adapter_state", {"number": number})
        adapter.error = answer["error"]
        if answer["state"] != "ready" or number in self.leaving:
            return
        for before in list(self.loaded):
            if self._adapters[before].name == adapter.name:
                self.unload(before)
        adapter.is_ready = True
        self.contents[number] = answer["content"].encode()
        self.loaded.add(number)

    def drop_unused(self, used: Iterable[int]) -> None:
        """`used`: of all requests that have not ended. Asked while one is leaving."""
        for number in self.leaving.difference(used):
            self._drop(number)

    def _drop(self, number: int) -> None:
        self.leaving.discard(number)
        self.loaded.discard(number)
        self.contents.pop(number, None)
        del self._adapters[number]
        self._control("drop_adapter", {"number": number})
