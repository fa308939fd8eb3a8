"""A watermark of sampled text, as the option says it. What it does stands in quire/watermark.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import OptionError, suggestion

OPTION = "watermark_config"
_ALGORITHM = "gumbel"
_MOST_WIDTH = 64


@dataclass(frozen=True, kw_only=True)
class Watermark:
    """Whose mark it is, and over how many tokens it goes."""

    key: int
    context_width: int = 4

    def __repr__(self) -> str:
        # the key is a secret, and configurations are shown
        return f"Watermark(context_width={self.context_width})"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Watermark:
        """What the option says."""
        known = ("key", "context_width", "algorithm")
        for name in config:
            if name not in known:
                raise OptionError(f"{OPTION}: {name!r} is unknown.{suggestion(str(name), known)}")
        if config.get("algorithm", _ALGORITHM) != _ALGORITHM:
            raise OptionError(f"{OPTION}: algorithm={config['algorithm']!r}: there is {_ALGORITHM} alone.")
        key, width = config.get("key"), config.get("context_width", 4)
        if type(key) is not int or not 0 <= key < 1 << 64:
            raise OptionError(f"{OPTION}: key: must be a whole number of up to 64 bits, which you keep to yourself.")
        if type(width) is not int or not 1 <= width <= _MOST_WIDTH:
            raise OptionError(f"{OPTION}: context_width={width!r}: must be a whole number from 1 to {_MOST_WIDTH}.")
        return cls(key=key, context_width=width)
