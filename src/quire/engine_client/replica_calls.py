"""Management operations of several engine cores that stand behind one link: which of them an operation is for, and how
their answers become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.messages import ControlReply

# about what one core keeps: the argument that names it
OF_A_HANDLE = {"fork_kept": "handle", "rewind_kept": "handle", "release_kept": "handle", "pin_kept": "handle"}
# what one core did, and not the sum of all: the first one answers
OF_THE_FIRST = frozenset({"observe_state", "observe_blocks", "recent_decisions", "recording", "list_adapters"})
# the same for one replica: replica.NUMBER.NAME
ONE = "replica."

Merge = Callable[[Sequence[Any]], Any]


@dataclass
class FannedCall:
    """One call of the client, and the answers that have come."""

    call_id: int
    name: str
    awaited: set[int]
    # under which something is kept if it succeeds
    new_handle: str | None = None
    results: dict[int, Any] = field(default_factory=dict)
    error: str | None = None

    def take(self, replica: int, reply: ControlReply) -> None:
        self.awaited.discard(replica)
        if reply.error is None:
            self.results[replica] = reply.result
        elif self.error is None:
            self.error = reply.error

    def lose(self, replica: int) -> None:
        """It will not answer; the others may."""
        self.awaited.discard(replica)

    def reply(self) -> ControlReply | None:
        """Once nobody is awaited."""
        if self.awaited:
            return None
        if self.error is None and not self.results:
            self.error = "The replica that was asked has died."
        if self.error is not None:
            return ControlReply(call_id=self.call_id, error=self.error)
        # in the order of the replicas
        results = [self.results[number] for number in sorted(self.results)]
        return ControlReply(call_id=self.call_id, result=_MERGES.get(self.name, _first)(results))


def _first(results: Sequence[Any]) -> Any:
    return results[0]


def _concatenated(results: Sequence[list[Any]]) -> list[Any]:
    return [entry for result in results for entry in result]


def added(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers by name, summed, also those that are further down; a size of blocks is that of each."""
    total: dict[str, Any] = {}
    for result in results:
        for name, value in result.items():
            if isinstance(value, Mapping):
                total[name] = added([total.get(name, {}), value])
            elif name == "block_size":
                total[name] = value
            else:
                total[name] = total.get(name, 0) + value
    return total


def _slowest(results: Sequence[str]) -> str:
    """An adapter is ready when it is so everywhere."""
    return next((state for state in results if state != "ready"), "ready")


_MERGES: dict[str, Merge] = {
    "statistics": added,
    "memory": added,
    "worker.statistics": added,
    "worker.expert_tokens": added,
    "list_kept": _concatenated,
    "adapter_state": _slowest,
    "worker.prepare_form": all,
}
