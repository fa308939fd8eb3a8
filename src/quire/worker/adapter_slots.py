"""The worker's adapters: those that are loaded, and which of them are in the slots of the layers.

    files --(a thread beside the steps)--> memory, one copy each --(least recently used leave)--> slots of all layers

Owns both. A step's adapters are brought into slots before it is computed; the core grants no step more of them than
there are slots. Numbers come from the core and are never used twice. Called by Worker (controls) and ModelRunner.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.config.lora import MOST_LOADING
from quire.errors import ModelError, UserError, one_line
from quire.messages import SchedulerOutput
from quire.worker.adapter_files import AdapterTargets, read_adapter
from quire.worker.layers.adapters import AdapterStack, PackedAdapter
from quire.worker.layers.experts import Expert, Router
from quire.worker.layers.latent import HeadLinear
from quire.worker.layers.linear import ReplicatedLinear
from quire.worker.lazy_memory import lazy_zeros
from quire.worker.models.causal_lm import CausalLM, has_sources
from quire.worker.row_table import RowTable
from quire.worker.step_isolation import StepIsolation
from quire.worker.step_member import StepMember

logger = logging.getLogger(__name__)
# linear layers that are computed by other operators than theirs
_WITHOUT_SLOTS = (Router, HeadLinear)
# for one that is being read, while nothing else is to be done
_MOST_WAIT_SECONDS = 0.005
CHANGED = (
    "its files have changed since it was loaded. Load it again (load_inplace), or put the files back as they were."
)
NOT_LOADED = "its adapter is not loaded any more. Load it again."


class _Loading:
    """One adapter on its way into memory."""

    def __init__(self, folder: str, targets: AdapterTargets, expected: str | None) -> None:
        """`expected`: the content, of one that was here before."""
        self.weights: dict[str, PackedAdapter] | None = None
        self.error: str | None = None
        # what tells it from all others, whatever its name and number
        self.content = ""
        self._folder = folder
        self._targets = targets
        self._expected = expected
        self._thread = threading.Thread(target=self._read, name="quire-adapter", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with torch.inference_mode():
                weights = read_adapter(Path(self._folder), self._targets)
                packed = {name: self._targets.layers[name][1].pack(parts) for name, parts in weights.items()}
                self.content = _content_of(packed)
                if self._expected not in (None, self.content):
                    raise ModelError(CHANGED)
                self.weights = packed
        except UserError as error:
            self.error = str(error)
        except Exception as error:
            logger.exception("an adapter could not be read")
            self.error = f"the adapter cannot be read ({type(error).__name__}: {one_line(error)})."

    @property
    def num_bytes(self) -> int:
        return sum(packed.a.nbytes + packed.b.nbytes for packed in (self.weights or {}).values())

    def wait(self) -> None:
        self._thread.join(_MOST_WAIT_SECONDS)

    @property
    def state(self) -> str:
        return "failed" if self.error is not None else "loading" if self.weights is None else "ready"


def _content_of(weights: Mapping[str, PackedAdapter]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, packed in sorted(weights.items()):
        hasher.update(f"{name} {packed.rank}".encode())
        for matrix in (packed.a, packed.b):
            hasher.update(matrix.contiguous().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


class Adapters:
    """All adapters of one model."""

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        slot_bytes: int = 0,
        whole: nn.Module | None = None,
    ) -> None:
        """`whole`: the model with the layers of all stages, where this one has some of them."""
        self._slot_bytes = slot_bytes
        layers = None if whole is None else layers_for_slots(whole)
        self._targets = AdapterTargets.of(model, max_rank, dtype, layers)
        self._loaded: dict[int, _Loading] = {}
        # of those that were evicted
        self._content_by_number: dict[int, str] = {}
        # number in each slot, 0 for none, and the step in which it was used last
        self._in_slot = np.zeros(num_slots, dtype=np.int64)
        self._used_at = np.zeros(num_slots, dtype=np.int64)
        self.num_fills = 0
        self.num_evictions = 0

    def most_bytes(self, most_in_memory: int) -> tuple[int, int]:
        """(of slots, of what is in memory), with so many there: one that is read is there twice meanwhile."""
        return len(self._in_slot) * self._slot_bytes, (most_in_memory + MOST_LOADING) * self._slot_bytes

    # ------------------------------------------------------------------------------------------ controls

    def load(self, number: int, path: str) -> None:
        """Begins to read; `state` says how far it is. Of a number that was evicted none but the same comes back."""
        self._loaded[number] = _Loading(path, self._targets, self._content_by_number.get(number))

    def wait(self, number: int) -> None:
        """For one that is being read, a few milliseconds."""
        if number in self._loaded:
            self._loaded[number].wait()

    def state(self, number: int) -> dict[str, Any]:
        """Of this rank's part; the executor makes one of those of all ranks."""
        loading = self._loaded.get(number)
        if loading is None:
            return {"state": "failed", "error": NOT_LOADED, "content": ""}
        return {"state": loading.state, "error": loading.error, "content": loading.content}

    def evict(self, number: int) -> None:
        """No row of the next steps has it, and it may be loaded again."""
        loading = self._loaded.pop(number, None)
        self._in_slot[self._in_slot == number] = 0
        if loading is not None and loading.weights is not None:
            self._content_by_number[number] = loading.content
            self.num_evictions += 1

    def drop(self, number: int) -> None:
        """No row of a later step has it."""
        self._loaded.pop(number, None)
        self._content_by_number.pop(number, None)
        self._in_slot[self._in_slot == number] = 0

    def statistics(self) -> dict[str, float]:
        return {
            "num_adapters_loaded": len(self._loaded),
            "adapter_bytes": len(self._in_slot) * self._slot_bytes
            + sum(one.num_bytes for one in self._loaded.values()),
            "num_adapters_in_slots": int((self._in_slot > 0).sum()),
            "num_adapter_slot_fills_total": self.num_fills,
            "num_adapter_evictions_total": self.num_evictions,
        }

    # ------------------------------------------------------------------------------------------ a step

    def bring(self, numbers: list[int], step: int) -> dict[int, int]:
        """Slots of these adapters, by number; those that are not loaded are missing."""
        slots = {number: slot for slot, number in enumerate(self._in_slot.tolist()) if number in numbers}
        self._used_at[list(slots.values())] = step
        for number in numbers:
            loading = self._loaded.get(number)
            if number in slots or loading is None or loading.weights is None:
                continue
            is_free = np.flatnonzero(~np.isin(self._in_slot, numbers))
            slot = int(is_free[np.argmin(np.where(self._in_slot[is_free] > 0, self._used_at[is_free], -1))])
            self._fill(slot, loading.weights)
            self._in_slot[slot] = number
            self._used_at[slot] = step
            slots[number] = slot
        return slots

    def _fill(self, slot: int, weights: Mapping[str, PackedAdapter]) -> None:
        # until all of it is there the slot is nobody's
        self._in_slot[slot] = 0
        for name, (_, stack) in self._targets.layers.items():
            stack.fill(slot, weights.get(name))
        self.num_fills += 1


class AdapterMember(StepMember):
    """Before a step: every row that has an adapter learns its slot."""

    def __init__(self, adapters: Adapters, table: RowTable, isolation: StepIsolation) -> None:
        self._adapters = adapters
        self._table = table
        self._isolation = isolation

    def prepare(self, scheduled: SchedulerOutput) -> dict[int, str]:
        numbers = self._table.adapters[scheduled.rows]
        if not numbers.any():
            return {}
        slots = self._adapters.bring(np.unique(numbers[numbers > 0]).tolist(), scheduled.step)
        failures: dict[int, str] = {}
        for row, number in zip(scheduled.rows.tolist(), numbers.tolist(), strict=True):
            if number and number not in slots:
                self._isolation.fail(row)
                failures[row] = NOT_LOADED
        self._table.use_slots(scheduled.rows, np.array([slots.get(number, -1) for number in numbers.tolist()]))
        return failures


def attach(model: nn.Module, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
    """Gives every linear layer of the model slots for adapters; bytes that a slot takes, and an adapter at most.

    The head and the embedding have none, and neither have experts, their routers and what latent vectors go through.
    """
    if not isinstance(model, CausalLM):
        raise ModelError(
            f"enable_lora: {type(model).__name__} runs through the Transformers library, and adapters are built for "
            "Quire's own models only. Leave enable_lora out, or take model_impl=native."
        )
    if has_sources(model):
        raise ModelError(
            f"enable_lora: {type(model).__name__} has an encoder, and adapters are built for decoders alone. Leave it "
            "out, or merge the adapter into the weights."
        )
    stacks: list[AdapterStack] = []
    for layer in layers_for_slots(model).values():
        stack = AdapterStack(max_rank, layer.in_features, layer.part_sizes, dtype)
        layer.adapters = stack
        stacks.append(stack)
    sizes = [num_slots * stack.elements_of_slot for stack in stacks]
    memory = _zeros(sum(sizes), dtype, next(model.parameters()).device)
    for stack, piece in zip(stacks, memory.split(sizes), strict=True):
        stack.place(piece)
    logger.info("slots for %d adapters of rank %d take %.1f MiB", num_slots, max_rank, memory.nbytes / 2**20)
    return memory.nbytes // num_slots


def layers_for_slots(model: nn.Module) -> dict[str, ReplicatedLinear]:
    """Those that take adapters, by name."""
    experts = [module for module in model.modules() if isinstance(module, Expert)]
    inside_experts = {id(layer) for expert in experts for layer in expert.modules()}
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, ReplicatedLinear)
        and not isinstance(layer, _WITHOUT_SLOTS)
        and id(layer) not in inside_experts
    }


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In one piece, so that huge pages fit: what a step reads of it lies in order."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    memory = lazy_zeros((count * dtype.itemsize,), np.uint8, use_huge_pages=True)
    return torch.from_numpy(memory).view(dtype)
