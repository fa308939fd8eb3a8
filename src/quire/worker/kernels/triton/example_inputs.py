"""What examples are called with: tensors without memory where kernels are only compiled or counted, real ones where
they are timed on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_device = torch.device("meta")


@contextmanager
def examples_on(device: str) -> Iterator[None]:
    """Examples that are called meanwhile get tensors of this device."""
    global _device
    before, _device = _device, torch.device(device)
    try:
        yield
    finally:
        _device = before


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers, because units that multiply zeros run faster than any model lets them; codes get some bytes."""
    if dtype.itemsize == 1:
        return raw(*shape).view(dtype)
    return torch.empty(shape, dtype=dtype, device=_device).normal_()


def raw(*shape: int) -> Tensor:
    """Bytes. Read as floats of any type they are small numbers."""
    return torch.empty(shape, dtype=torch.uint8, device=_device).random_(0, 32)


def given(values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """These numbers: what tells a kernel where to read and write."""
    return torch.tensor(list(values), dtype=dtype, device="cpu").to(_device)


def on_host(values: Iterable[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """The same for what a function sends to the device itself."""
    numbers = torch.tensor(list(values), dtype=dtype, device="cpu")
    return numbers.to("meta") if _device.type == "meta" else numbers
