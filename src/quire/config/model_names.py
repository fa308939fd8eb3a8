"""The names by which somebody may know a model that was given no other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config.engine_options import EMBEDDED

_EMBEDDED_NAME = "quire-embedded"
# how the hub's client names the folder of a repository
_HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def names_of_model(model: str, path: Path, hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """As it was typed; the last part of that; and what the hub calls it, as far as that is written down."""
    if model == EMBEDDED:
        return (_EMBEDDED_NAME, EMBEDDED)
    in_folders = [_HUB_FOLDER.fullmatch(part) for part in path.parts]
    on_the_hub = [f"{match[1]}/{match[2]}" for match in in_folders if match is not None]
    written = str(hf_config.get("_name_or_path", ""))
    if _REPOSITORY.fullmatch(written):
        on_the_hub.append(written)
    return tuple(dict.fromkeys((model, Path(model).name or model, *on_the_hub)))
