"""Every launch of a kernel goes through here, so that it can be compiled, counted or watched instead of run.

A launch is a kernel, a grid and arguments. On a device it runs. For tensors without memory (`meta`) it does nothing,
and whoever records launches learns what a call would have started.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """What a kernel's shape may depend on: the device, never the batch."""

    backend: str
    arch: int | str
    # processors that run programs side by side
    num_units: int
    shared_bytes: int

    @property
    def has_warpgroups(self) -> bool:
        """Whether four warps multiply 64 rows in one instruction (Hopper and the large Blackwells)."""
        return self.backend == "cuda" and self.arch in (90, 100, 103)

    @property
    def has_fp8(self) -> bool:
        """Whether it reads eight-bit floats of the kind that a cache holds."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89


TARGETS = {
    "sm_80": Target("cuda", 80, 108, 163 << 10),
    "sm_90": Target("cuda", 90, 132, 227 << 10),
    "sm_100": Target("cuda", 100, 148, 227 << 10),
    "sm_120": Target("cuda", 120, 170, 99 << 10),
    "gfx942": Target("hip", "gfx942", 304, 64 << 10),
}


@dataclass(frozen=True)
class Launch:
    """`arguments` by the names of the kernel's parameters, its constants among them; `options` are the compiler's."""

    kernel: Any
    grid: Grid
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Example:
    """A call of a kernel's function as a model makes it.

    `bytes_moved` and `operations` are what the call must read, write and compute at the least; without `bytes_moved` it
    is what its launches are given, each tensor once.
    """

    name: str
    call: Callable[[], object]
    bytes_moved: int | None = None
    # multiplications and additions in the tensor cores
    operations: int = 0


@dataclass
class _Recorded:
    target: Target | None
    launches: list[Launch] = field(default_factory=list)


_recorded: _Recorded | None = None


def target() -> Target:
    """That of the device which is current; of the interpreter, a Hopper's."""
    if _recorded is not None and _recorded.target is not None:
        return _recorded.target
    return _device(torch.cuda.current_device()) if torch.cuda.is_available() else TARGETS["sm_90"]


@functools.cache
def _device(number: int) -> Target:
    properties = torch.cuda.get_device_properties(number)
    shared_bytes = properties.shared_memory_per_block_optin
    if torch.version.hip:
        name = properties.gcnArchName.partition(":")[0]
        return Target("hip", name, properties.multi_processor_count, shared_bytes)
    arch = properties.major * 10 + properties.minor
    return Target("cuda", arch, properties.multi_processor_count, shared_bytes)


def launch(
    kernel: Any,
    grid: Grid,
    *arguments: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run a kernel for every place of a grid; nothing at all where that is empty.

    `registers` is what a thread may have at most, where the compiler would take more without need.
    """
    if math.prod(grid) == 0:
        return
    names = kernel.arg_names
    named = dict(zip(names, arguments, strict=False)) | constants
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if registers is not None:
        options["maxnreg"] = registers
    if _recorded is not None:
        _recorded.launches.append(Launch(kernel, grid, {name: named[name] for name in names}, options))
    if not any(isinstance(value, Tensor) and value.is_meta for value in named.values()):
        run(Launch(kernel, grid, named, options))


def run(launched: Launch) -> None:
    """On the device of its tensors."""
    launched.kernel[launched.grid](**launched.arguments, **launched.options)


@contextmanager
def record_launches(target_name: str | None = "sm_90") -> Iterator[list[Launch]]:
    """What is launched meanwhile, as if for this target; None: for the device that is there."""
    global _recorded
    before, _recorded = _recorded, _Recorded(None if target_name is None else TARGETS[target_name])
    try:
        yield _recorded.launches
    finally:
        _recorded = before


def least_bytes(example: Example) -> int:
    """What it must read and write at the least."""
    if example.bytes_moved is not None:
        return example.bytes_moved
    with record_launches() as launches:
        example.call()
    given = {id(value): value for launch in launches for value in launch.arguments.values()}
    return sum(value.nbytes for value in given.values() if isinstance(value, Tensor))
