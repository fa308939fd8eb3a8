"""Random weights for a model whose config.json alone is there (load_format=dummy): for benchmarks and tests."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

_STD = 0.02


def fill_with_random_weights(model: nn.Module, seed: int = 0) -> None:
    """Every parameter of a model."""
    for name, parameter in model.named_parameters():
        fill_randomly(name, parameter.data, seed)


def fill_randomly(name: str, parameter: Tensor, seed: int = 0) -> None:
    """Normal weights with standard deviation 0.02; norms scale by one and biases are zero, as in a fresh model.

    Each parameter has a seed of its own, made from its name, so that the order of parameters does not matter.
    """
    if parameter.ndim == 1:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()) ^ seed)
    parameter.normal_(0.0, _STD, generator=generator)
