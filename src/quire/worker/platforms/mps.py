"""Apple's GPUs, through Metal: refused, with the reason.

Triton compiles nothing for them, so every operator would be its specification in plain PyTorch. That is slower than the
kernels of the processor beside it, which shares its memory; and parts of it are in float64, which Metal does not have.
"""

from __future__ import annotations

from quire.errors import OptionError


def refuse() -> OptionError:
    """Why a worker cannot run there."""
    return OptionError(
        "device=mps: Quire has no kernels for Apple's GPUs, and what it would run instead needs float64, which they "
        "lack. Use device=cpu."
    )
