"""What a user may ask of an embedding. Names are vLLM's, where it has them."""

from __future__ import annotations

import msgspec

from quire.errors import RequestError, suggestion
from quire.parameter_checks import Bounds, Suggesting, check_bounds, check_flags, make_plain

# How one vector is made of the hidden states of a prompt: that of its last token, or the mean of all.
LAST = "last"
MEAN = "mean"
POOLINGS = (LAST, MEAN)
_BOUNDS: tuple[Bounds, ...] = (("dimensions", 1, 2**20),)


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Suggesting):
    """How a prompt becomes a vector.

    `pooling` is "last" or "mean"; None is what the model's authors say (1_Pooling/config.json), else "last".
    `dimensions` keeps so many of the first numbers, for models that were trained for it (Matryoshka). `normalize` gives
    the vector the length 1, after it was cut.
    """

    pooling: str | None = None
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.pooling is not None and self.pooling not in POOLINGS:
            hint = suggestion(self.pooling, POOLINGS) if isinstance(self.pooling, str) else ""
            raise RequestError(
                f"pooling={self.pooling!r}: must be {' or '.join(POOLINGS)}, or None for the model's own.{hint}",
                param="pooling",
            )
        check_bounds(self, _BOUNDS, optional=("dimensions",))
        check_flags(self, ("normalize",))
