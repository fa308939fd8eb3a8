"""Which adapters (LoRA) the engine has: names, numbers, which of them are in the workers' memory, and who uses them.

    load -> is read -> in memory, in use -> in memory, idle -> (another needs the place) evicted
                             ^                                              |
                             +---- is read again, for requests that wait <--+

A number is given once and never again, so that blocks and rows of an older version are never taken for those of a newer
one. An adapter keeps its number while it is evicted: the workers take back none but the same bytes. Reading goes on in
the workers beside the steps, few at a time, and whoever waits for it stands in nobody's way. One that is unloaded takes
no new request, and leaves when its last request has ended. Several front ends may load at the same time: a name has one
adapter, and while it is being loaded one more. Called by EngineCore for clients, and as one of the prerequisites of
requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config.lora import MOST_LOADING
from quire.engine_core.request import Request
from quire.engine_core.scheduler.prerequisites import Prerequisite
from quire.errors import UserError
from quire.messages import EngineRequest

# (operation of the worker, its arguments) -> result
WorkerControl = Callable[[str, dict[str, Any]], Any]


@dataclass
class _Adapter:
    name: str
    path: str
    # it was loaded once, and requests may name it
    is_ready: bool = False
    # why it could not be loaded, until whoever began it has been told
    error: str | None = None
    # requests that have not ended: those that do not wait for it, and those that do, by id
    num_users: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)


class EngineAdapters(Prerequisite):
    """The registry. `loaded` holds the numbers that requests may name."""

    def __init__(self, control: WorkerControl, most: int, *, content_names_blocks: bool = False) -> None:
        """At most so many in memory; 0: the engine has no slots for any. `content_names_blocks`: blocks go by what is
        in an adapter, because its number is this engine's own and others read them."""
        self._control = control
        self._most = most
        self._content_names_blocks = content_names_blocks
        self._adapters: dict[int, _Adapter] = {}
        # those in the workers' memory or on their way there, the least recently used first
        self._in_memory: dict[int, None] = {}
        # those of them that are on their way
        self._loading: dict[int, None] = {}
        # those that are to come there, in the order of asking
        self._wanted: dict[int, None] = {}
        # All are in use and others are wanted: this one is the next to leave, and its new requests wait, too.
        self._closing: int | None = None
        self._number_by_user: dict[int, int] = {}
        self._answers: list[tuple[Request, str | None]] = []
        # no new request may name them
        self.leaving: set[int] = set()
        self._last_number = 0
        # what took the place of a version; requests that name the one before it are still on their way
        self._successors: dict[int, int] = {}
        self.loaded: set[int] = set()
        # of those: what tells an adapter from all others, in any engine
        self._contents: dict[int, bytes] = {}

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {
            "load_adapter": self.load,
            "adapter_state": self.state,
            "unload_adapter": self.unload,
            "list_adapters": self.all,
        }

    # ------------------------------------------------------------------------------------------ for clients

    def load(self, name: str, path: str, in_place: bool = False, number: int | None = None) -> int | None:
        """Begins to load; the number by which requests name it, once `state` says that it is ready. None if the name is
        taken: by one that is loaded, unless this one takes its place, or by one that is being loaded. `number`: a free
        one, of a client that has several engines, where it must be the same."""
        if not self._most:
            raise UserError("This engine was started without adapters. Start it with enable_lora=True (--enable-lora).")
        self._look()
        if any(one.name == name and not (one.is_ready and in_place) for one in self._staying()):
            return None
        if number is None:
            number = self._last_number + 1
        self._last_number = max(self._last_number, number)
        self._adapters[number] = _Adapter(name, path)
        self._wanted[number] = None
        self._bring()
        return number

    def state(self, number: int) -> str:
        """loading or ready. Raises what was wrong with its files, and forgets it then."""
        adapter = self._adapters.get(number)
        if adapter is None:
            raise UserError("The adapter is not loaded.")
        self._look()
        self._bring()
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
        self._forget_versions_before(number)
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

    # ------------------------------------------------------------------------------------------ for requests

    def meant_by(self, message: EngineRequest) -> EngineRequest:
        """Another version may have been loaded since its client looked the name up."""
        newest = self._successors.get(message.adapter)
        return message if newest is None else msgspec.structs.replace(message, adapter=newest)

    def content_of(self, message: EngineRequest) -> bytes:
        return self._contents.get(message.adapter, b"") if self._content_names_blocks else b""

    def reason_to_refuse(self, request: Request) -> str | None:
        """Only what is loaded and not about to leave. Whoever uses it already goes on, also with more of its prompt."""
        number = request.message.adapter
        if not number or number in self.loaded or request.request_id in self._number_by_user:
            return None
        return "The adapter of this request is not loaded any more. Load it again, or name another model."

    def ask(self, request: Request) -> bool:
        number = request.message.adapter
        adapter = self._adapters.get(number)
        if adapter is None:
            return False
        self._number_by_user[request.request_id] = number
        if number in self._in_memory and number not in self._loading and number != self._closing:
            self._use(number)
            return False
        adapter.waiting[request.request_id] = request
        if number not in self._loading:
            self._wanted.setdefault(number)
        return True

    def arrived(self) -> list[tuple[Request, str | None]]:
        if not (self._wanted or self._answers or self._loading):
            return []
        self._look()
        self._bring()
        answers = self._answers
        self._answers = []
        return answers

    def ended(self, request: Request) -> None:
        number = self._number_by_user.pop(request.request_id, None)
        if number is None:
            return
        adapter = self._adapters[number]
        if adapter.waiting.pop(request.request_id, None) is None:
            adapter.num_users -= 1
            self._is_used_now(number)
        elif adapter.is_ready and not adapter.waiting:
            self._wanted.pop(number, None)

    def wait(self) -> bool:
        if self._loading:
            self._control("await_adapter", {"number": next(iter(self._loading))})
        return bool(self._loading)

    def settled(self) -> None:
        """Those that are leaving and that nobody needs any more are dropped."""
        for number in list(self.leaving) if self.leaving else ():
            adapter = self._adapters[number]
            if not (adapter.num_users or adapter.waiting):
                self._drop(number)

    def check_invariants(self) -> None:
        adapters = self._adapters.values()
        num_users = sum(one.num_users + len(one.waiting) for one in adapters)
        assert num_users == len(self._number_by_user), "somebody uses an adapter and is not known, or the other way"
        assert len(self._in_memory) <= self._most, "more adapters are in memory than may be"
        for number, adapter in self._adapters.items():
            assert number in self._in_memory or not adapter.num_users, "an adapter that is in use was evicted"

    # ------------------------------------------------------------------------------------------ memory

    def _bring(self) -> None:
        """Those that are wanted, in the places of those that nobody uses."""
        self._closing = None
        for number in list(self._wanted):
            if number not in self._in_memory:
                if len(self._loading) >= MOST_LOADING or not self._make_place():
                    return
                self._loading[number] = None
                self._in_memory[number] = None
                self._control("load_adapter", {"number": number, "path": self._adapters[number].path})
            elif number not in self._loading:
                self._answer(number, None)
            del self._wanted[number]

    def _make_place(self) -> bool:
        if len(self._in_memory) < self._most:
            return True
        here = [number for number in self._in_memory if number not in self._loading]
        idle = next((number for number in here if not self._adapters[number].num_users), None)
        if idle is None:
            self._closing = next(iter(here), None)
            return False
        self._evict(idle)
        return True

    def _evict(self, number: int) -> None:
        del self._in_memory[number]
        self._control("evict_adapter", {"number": number})

    def _use(self, number: int) -> None:
        self._adapters[number].num_users += 1
        self._is_used_now(number)

    def _is_used_now(self, number: int) -> None:
        if number in self._in_memory:
            del self._in_memory[number]
            self._in_memory[number] = None

    def _answer(self, number: int, error: str | None) -> None:
        """To all that wait for it."""
        adapter = self._adapters[number]
        waiting = list(adapter.waiting.values())
        adapter.waiting.clear()
        for request in waiting:
            if error is None:
                self._use(number)
            else:
                # nothing of it is there that could be used until it is told
                del self._number_by_user[request.request_id]
            self._answers.append((request, error))

    # ------------------------------------------------------------------------------------------ what the workers say

    def _staying(self) -> list[_Adapter]:
        """Those that nobody has unloaded, and that did not fail."""
        return [one for number, one in self._adapters.items() if number not in self.leaving and one.error is None]

    def _look(self) -> None:
        """At all that are being loaded: whoever began it may have died, and does not ask any more."""
        for number in list(self._loading):
            self._look_at(number, self._adapters[number])

    def _look_at(self, number: int, adapter: _Adapter) -> None:
        answer = self._control("adapter_state", {"number": number})
        if answer["state"] == "loading":
            return
        del self._loading[number]
        if answer["error"] is not None:
            self._evict(number)
            if adapter.is_ready:
                self._answer(number, f"{adapter.name}: {answer['error']}")
            else:
                adapter.error = answer["error"]
        elif adapter.is_ready:
            self._answer(number, None)
        elif number not in self.leaving:
            self._admit(number, adapter, answer["content"])

    def _admit(self, number: int, adapter: _Adapter, content: str) -> None:
        """Requests may name it from now on, and no longer another one of its name."""
        for before in list(self.loaded):
            if self._adapters[before].name == adapter.name:
                self.unload(before)
                self._successors[before] = number
        adapter.is_ready = True
        self._contents[number] = content.encode()
        self.loaded.add(number)

    def _forget_versions_before(self, number: int) -> None:
        self._successors = {before: after for before, after in self._successors.items() if after != number}

    def _drop(self, number: int) -> None:
        self.leaving.discard(number)
        self.loaded.discard(number)
        self._contents.pop(number, None)
        self._wanted.pop(number, None)
        self._loading.pop(number, None)
        self._in_memory.pop(number, None)
        del self._adapters[number]
        self._control("drop_adapter", {"number": number})
