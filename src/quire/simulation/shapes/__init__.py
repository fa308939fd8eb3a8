"""Models by name: a folder each with the config.json that says their shape, and no weights."""

from __future__ import annotations

import os
from pathlib import Path

from quire.config import EMBEDDED
from quire.config.model_source import embedded_path
from quire.errors import ModelError, suggestion

_FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def model_folder(name: str) -> Path:
    """Of a shape that ships with Quire, or a folder that has a config.json."""
    if name == EMBEDDED:
        return embedded_path()
    if name.lower() in shape_names():
        return _FOLDER / name.lower()
    path = Path(os.path.expanduser(name))
    if (path / "config.json").is_file():
        return path.resolve()
    if path.is_file() and path.name == "config.json":
        return path.parent.resolve()
    names = shape_names()
    raise ModelError(
        f"model={name[:80]}: must be one of {', '.join(names)}, or a folder with a config.json."
        f"{suggestion(name, names) or ''}"
    )
