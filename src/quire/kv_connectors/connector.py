"""KV connectors: where keys and values come from, or go to, if not this engine's own blocks (4.4.4).

A connector has two halves. The scheduler half says what can be had, and what its worker half must know to get it; it
lives with the engine core, without tensors. The worker half moves the contents of blocks. What both say to each other
travels with the step that needs it: SchedulerOutput.step_data["kv_connector"]. See docs/kv-connectors.md.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.messages import KVTransfer, LayerSpec

Tokens = npt.NDArray[np.int32]

# the name of what both halves say to each other
STEP_DATA = "kv_connector"


@dataclass(frozen=True)
class CacheLayout:
    """What a block of this engine holds. Only engines with equal layouts can read each other's."""

    model: str
    dtype: str
    block_size: int
    # by group of layers
    groups: tuple[tuple[LayerSpec, ...], ...]

    @classmethod
    def of(
        cls, model: str, dtype: str, block_size: int, groups: Iterable[Iterable[str]], specs: Iterable[LayerSpec]
    ) -> CacheLayout:
        by_name = {spec.name: spec for spec in specs}
        return cls(model, dtype, block_size, tuple(tuple(by_name[name] for name in names) for names in groups))

    @property
    def has_windows(self) -> bool:
        return any(spec.sliding_window for specs in self.groups for spec in specs)

    @property
    def has_states(self) -> bool:
        return any(spec.state_bytes for specs in self.groups for spec in specs)

    @property
    def keeps_parts(self) -> bool:
        """Whether a group keeps only the first tokens of a sequence, or only those behind them."""
        return any(spec.part for specs in self.groups for spec in specs)

    def difference(self, other: CacheLayout) -> str | None:
        """The first thing in which both differ, in words."""
        for field in dataclasses.fields(self):
            own = getattr(self, field.name)
            theirs = getattr(other, field.name)
            if own != theirs:
                return "layers" if field.name == "groups" else f"{field.name} {own}, not {theirs}"
        return None


class BlockLoad(msgspec.Struct, kw_only=True):
    """Blocks to fill before anything of the step is computed."""

    # the sequence that begins behind them
    row: int

    # what the scheduler half says about it
    source: Any
    # the first of the prefix' blocks that is needed
    first_block: int
    # by group of layers: where they go
    blocks: list[list[int]]


class BlockStore(msgspec.Struct, kw_only=True):
    """Blocks that hold these tokens, from the first on, once the step has been computed."""

    row: int
    key: str
    token_ids: np.ndarray
    # by group of layers
    blocks: list[list[int]]


class BlockSpill(msgspec.Struct, kw_only=True):
    """A block whose content is known by name, and is kept elsewhere as well once the step has been computed."""

    name: bytes
    block: int


class StepTransfers(msgspec.Struct, kw_only=True):
    """All that a step moves."""

    loads: list[BlockLoad] = []
    stores: list[BlockStore] = []
    spills: list[BlockSpill] = []


class Stages(Protocol):
    """The stages of a pipeline, which keep other layers of every block each, this one among them."""

    @property
    def is_first(self) -> bool: ...

    @property
    def is_last(self) -> bool: ...

    def send(self, x: Any) -> None:
        """To the next stage, which receives as many bytes."""

    def receive(self, out: Any) -> Any:
        """`out`, filled by the stage before."""


class Sharers(Protocol):
    """The ranks that keep a part of every block each, this one among them. All of a stage call the same at the same
    place. The scheduler half is in the process of number 0 of the first stage."""

    @property
    def number(self) -> int:
        """Of this rank in its stage."""

    @property
    def num_in_stage(self) -> int: ...

    def gather(self, x: Any) -> Any:
        """[N, bytes of all]: the rows that all of them bring, side by side in the order of their numbers."""

    def from_first(self, x: Any) -> Any:
        """The rows that number 0 brings; the others bring as many of any content."""

    def total(self, number: float) -> float:
        """The sum of what all of them bring."""


class StageSharers(Sharers, Protocol):
    """With the other stages, where there are some."""

    @property
    def stages(self) -> Stages: ...


class Found(Protocol):
    """A prefix that can be had; the scheduler half's own object."""

    @property
    def num_tokens(self) -> int: ...


class SchedulerHalf(Protocol):
    """Asked while a step is decided: it must answer at once, and must not wait for anybody."""

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        """Why this engine cannot do what a request asks for; what may be lost or late is no reason."""

    def find(self, key: str, token_ids: Tokens) -> Found | None:
        """What lies there of these tokens, from the first on, and can be read by this engine. Changes nothing."""

    def load(self, found: Found) -> Any:
        """It is loaded in the step that is being decided. What the worker half must know, as plain data."""

    def statistics(self) -> dict[str, float]: ...


class NamedBlocks(ABC):
    """The scheduler half of a connector that keeps single blocks under names that say what they hold, below the prefix
    cache. Nothing that it says makes a request fail: what is not there, or not in time, is computed."""

    @abstractmethod
    def name_of(self, group: int, content: bytes) -> bytes:
        """Under which a block of this engine is known everywhere: `content` is its chain hash."""

    @abstractmethod
    def set_price(self, seconds_per_block: float) -> None:
        """What computing a block's tokens anew takes; called once, before anything else."""

    @abstractmethod
    def ask(self, number: int, names: list[bytes], *, is_expected: bool) -> bool:
        """Has these brought near, as far as they lie anywhere, from the first on. Whether they are worth waiting for:
        `arrived` then says when the wait is over. `is_expected`: somebody is about to put them there."""

    @abstractmethod
    def arrived(self) -> list[int]:
        """The numbers whose wait is over, because all that can be had is near, or because it takes too long."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """Nobody needs them near any more under this number."""

    @abstractmethod
    def wait(self) -> None:
        """Until something arrives, a few milliseconds at most: there is nothing else to do."""

    @abstractmethod
    def near(self, names: list[bytes]) -> Sequence[Any]:
        """Those of these, from the first on, that a step could load now. Whoever has the answer can `lend` it, whatever
        other threads give up meanwhile."""

    @abstractmethod
    def lend(self, near: Sequence[Any]) -> Any:
        """These are loaded in the step that is being decided: what the worker half must know of it."""

    @abstractmethod
    def wants(self, name: bytes) -> bool:
        """A block of that name should be spilled."""

    @abstractmethod
    def statistics(self) -> dict[str, float]: ...


class WorkerHalf(Protocol):
    """Called by the worker in each step that moves something, with one entry at a time. An exception in `load` ends the
    request whose blocks it was about, one in `store` loses what was to be stored."""

    def open(self, layout: CacheLayout, tensors: Sequence[Any]) -> None:
        """Once, when the cache is there: tensors whose first dimension is the block."""

    def load(self, loads: list[BlockLoad]) -> None:
        """After the step's block copies, before anything is computed."""

    def store(self, stores: list[BlockStore]) -> None:
        """After the step; the blocks may change with the next one."""

    def spill(self, spills: list[BlockSpill]) -> None:
        """The same of single blocks, for halves whose scheduler half knows blocks by name; all of a step at once."""

    def close(self) -> None:
        """There are no more steps."""


class StagedHalf(WorkerHalf, Protocol):
    """Of a stage of a pipeline. Stages compute a step one after the other, so none can wait for all others."""

    def hand_on(self) -> None:
        """After the step: to the next stage, what that one needs of this step's loads."""

    def take_spilled(self) -> Mapping[bytes, bytes]:
        """This stage's part of what the step has spilled, by name; once, on the first rank of the stage."""

    def keep(self, blocks: Mapping[bytes, bytes]) -> None:
        """On the first rank of all: the parts of all stages, put together. In another thread than the other calls."""


class NoSchedulerHalf:
    """Nothing is anywhere else."""

    def reason_to_refuse(self, transfer: KVTransfer) -> str | None:
        if transfer.store is None and transfer.fetch is None:
            return None
        return "transfer: this engine has no connector. Start it with kv_connector, or leave store and fetch out."

    def find(self, key: str, token_ids: Tokens) -> Found | None:
        return None

    def load(self, found: Found) -> Any:
        raise AssertionError("nothing was found")

    def statistics(self) -> dict[str, float]:
        return {}


class NoWorkerHalf:
    """Nothing to move."""

    def open(self, layout: CacheLayout, tensors: Sequence[Any]) -> None: ...

    def load(self, loads: list[BlockLoad]) -> None:
        assert not loads, "there is no connector to load from"

    def store(self, stores: list[BlockStore]) -> None:
        assert not stores, "there is no connector to store with"

    def spill(self, spills: list[BlockSpill]) -> None:
        assert not spills, "there is no connector to spill to"

    def close(self) -> None: ...


class Connector(Protocol):
    """What an entry point of the group `quire.kv_connectors` names: a module, or anything else with these two."""

    def scheduler_half(self, layout: CacheLayout, **args: Any) -> SchedulerHalf | NamedBlocks:
        """`args` are those of the option kv_connector; a TypeError or OptionError says what is wrong with them."""

    def worker_half(self, **args: Any) -> WorkerHalf: ...
