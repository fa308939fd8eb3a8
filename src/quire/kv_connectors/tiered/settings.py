"""What the arguments of the connector say, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import num_bytes_of
from quire.errors import OptionError

ALWAYS = "always"
RULES = ("cost", ALWAYS)


@dataclass(frozen=True)
class TierSettings:
    """Engines of one process with equal settings share their tiers: names say what is in a block, whoever made it."""

    # addresses, the nearest first
    stores: tuple[str, ...]
    host_bytes: int
    # a request waits no longer for what comes
    max_wait: float
    # cost: only what comes back sooner than it is computed is written, waited for and fetched; always: everything
    rule: str

    @classmethod
    def of(cls, stores: Sequence[str], host_bytes: int | str, max_wait: float, rule: str) -> TierSettings:
        """As a user gives them."""
        if isinstance(stores, str):
            # a text is a sequence of texts, too, and one address would be many of one letter
            raise OptionError(f"stores={stores!r}: must be a list of addresses, such as [{stores!r}].")
        if not isinstance(stores, Sequence):
            raise OptionError(f"stores={stores!r}: must be a list of addresses.")
        return cls(tuple(stores), num_bytes_of(host_bytes, "host_bytes"), max_wait, rule)

    def __post_init__(self) -> None:
        if not isinstance(self.max_wait, int | float) or not 0 <= self.max_wait < 3600:
            raise OptionError(f"max_wait={self.max_wait!r}: must be a number of seconds, from 0 to 3600.")
        if self.rule not in RULES:
            raise OptionError(f"rule={self.rule!r}: must be one of {', '.join(RULES)}.")
        if not all(isinstance(store, str) for store in self.stores):
            raise OptionError(f"stores={list(self.stores)!r}: must be a list of addresses.")
