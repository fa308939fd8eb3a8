"""What a user may ask of an embedding. Names are vLLM's, where it has them."""

from __future__ import annotations

import msgspec

from quire.errors import RequestError, suggestion
from quire.parameter_checks import Bounds, Suggesting, check_bounds, check_flags, make_plain

# How one vector is made of the hidden states of a prompt: that of its last token, the mean of all, or that of the first
# token, where tokens see each other.
LAST = "last"
MEAN = "mean"
CLS = "cls"
POOLINGS = (LAST, MEAN, CLS)
_BOUNDS: tuple[Bounds, ...] = (("dimensions", 1, 2**20),)


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=Suggesting):
    """How a prompt becomes a vector.

    `pooling` is "last", "mean" or "cls"; None is what the model's authors say (1_Pooling/config.json).
    `dimensions` keeps so many of the first numbers, for models that were trained for it (Matryoshka). `normalize` gives
    the vector the length 1, after it was cut; None does so unless the authors say otherwise (modules.json).
    `use_activation=False` leaves the numbers of a head of labels as they are.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if self.pooling is not None and self.pooling not in POOLINGS:
            hint = suggestion(self.pooling, POOLINGS) if isinstance(self.pooling, str) else ""
            raise RequestError(
                f"pooling={self.pooling!r}: must be last, mean or cls, or None for the model's own.{hint}",
                param="pooling",
            )
        check_bounds(self, _BOUNDS, optional=("dimensions",))
        check_flags(self, [name for name in ("normalize", "use_activation") if getattr(self, name) is not None])
