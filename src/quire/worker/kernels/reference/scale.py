"""x times or divided by one number; computed in float32 and rounded once."""

from __future__ import annotations

from torch import Tensor


def scale(x: Tensor, factor: float, is_division: bool = False) -> Tensor:
    return (x.float() / factor if is_division else x.float() * factor).to(x.dtype)
