"""Sizes of config.json that a formula needs, under whatever name they have there."""

from __future__ import annotations

from typing import Any

from quire.errors import ModelError


def size_of(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these that the config has, if it can be a size."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ModelError(f"config.json: {name}={str(value)[:40]}: must be a whole number greater than 0.")
        return value
    if default is None:
        raise ModelError(f"config.json: none of {', '.join(names)} is there, so this model's size cannot be computed.")
    return default


def count_of(config: dict[str, Any], name: str) -> int:
    """A number that may be missing, null or 0."""
    return size_of(config, name) if config.get(name) else 0
