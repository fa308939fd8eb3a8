"""Arrays from the host to the device of the model, in few copies, and results back in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class SentToDevice:
    """By this process, in copies of arrays. Weights, blocks and images go other ways."""

    def __init__(self) -> None:
        self.num_bytes = 0


SENT_TO_DEVICE = SentToDevice()


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Tensors of these arrays; on a CPU they share memory, elsewhere arrays of one dtype travel in one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    moved: list[Tensor] = [torch.empty(0)] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
        flat = send(torch.from_numpy(np.concatenate([arrays[i].reshape(-1) for i in indices])), device)
        pieces = flat.split([arrays[i].size for i in indices])
        for i, piece in zip(indices, pieces, strict=True):
            moved[i] = piece.view(arrays[i].shape)
    return moved


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device. Out of pinned memory, because any other copy waits for the device."""
    if device.type == "cpu":
        return tensor
    SENT_TO_DEVICE.num_bytes += tensor.nbytes
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Array]:
    """Arrays of these tensors. The one place of a step that waits for the device.

    They travel as one float64 vector: token ids and counts (below 2**53) and float32 come through unchanged.
    """
    if all(tensor.is_cpu for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    flat = read(torch.cat([tensor.reshape(-1).double() for tensor in tensors]))
    bounds = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    pieces = np.split(flat, bounds)
    return [
        piece.reshape(tensor.shape).astype(_numpy_dtype(tensor.dtype))
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]


def read(flat: Tensor) -> Array:
    """Waits until the device has computed it."""
    return flat.cpu().numpy()


def _numpy_dtype(dtype: torch.dtype) -> npt.DTypeLike:
    return np.dtype(str(dtype).removeprefix("torch."))
