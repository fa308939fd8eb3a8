"""`hf_overrides`: other values for a model's config.json.

    <cache folder>/hf_overrides/<digest>/      config.json as it is meant, and links to all other files of the model

Whatever reads the model by its path, here, in a worker or in the Transformers library, reads the same values.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cache_folder import cache_folder, check_private
from quire.errors import OptionError, UserError, one_line
from quire.json_files import read_object

_CONFIG = "config.json"
# three spellings of how positions turn, of which the first is that of today
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")


def overridden(path: Path, overrides: Mapping[str, Any] | None) -> Path:
    """The model with these values: a folder beside it."""
    if not overrides:
        return path
    if path.is_file():
        raise OptionError(
            f"hf_overrides: {path.name} is a GGUF file, which has no config.json. Leave hf_overrides out, or give the "
            "directory of a checkpoint."
        )
    if not (path / _CONFIG).is_file():
        # who reads the model says so
        return path
    try:
        text = json.dumps(laid_over(read_object(path / _CONFIG), overrides), indent=2)
    except UserError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"hf_overrides: must hold what JSON can say ({one_line(error)}).") from None
    names = sorted(entry.name for entry in path.iterdir() if entry.name != _CONFIG)
    digest = hashlib.sha256("\n".join((str(path), *names, text)).encode()).hexdigest()
    root = cache_folder() / "hf_overrides"
    folder = root / digest[:32]
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(root)
        if not folder.is_dir():
            _make(folder, path, names, text)
    except OSError as error:
        raise OptionError(
            f"hf_overrides: a folder for the changed config.json cannot be made ({error}). Set QUIRE_CACHE_DIR to a "
            "folder that this program may write into."
        ) from error
    return folder


def laid_over(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values beside or instead of others; a part of the model (text_config) keeps those that are not named."""
    merged = {**config, **overrides}
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise OptionError(f"hf_overrides: {str(name)[:40]}: a name must be a text.")
        is_part = name.endswith("_config") and name != "quantization_config"
        if is_part and isinstance(value, Mapping) and isinstance(config.get(name), Mapping):
            merged[name] = laid_over(config[name], value)
    if overrides.keys() & set(_ROPE):
        for name in _ROPE:
            merged.pop(name, None)
        merged[_ROPE[0]] = _rope(config, overrides)
    return merged


def _rope(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """In one spelling, lest another one of the file's own wins."""
    written = config.get("rope_scaling") or config.get("rope_parameters")
    own: Mapping[str, Any] = written if isinstance(written, Mapping) else {}
    given = next((overrides[name] for name in _ROPE[:2] if name in overrides), own)
    if not isinstance(given, Mapping | None):
        raise OptionError(f"hf_overrides: rope_parameters={str(given)[:40]}: must be an object.")
    rope = dict(given or {})
    is_by_kind = any(isinstance(value, Mapping) for value in rope.values())
    if "rope_theta" not in overrides:
        base = own.get("rope_theta", config.get("rope_theta"))
        return rope if is_by_kind or base is None else {"rope_theta": base, **rope}
    if is_by_kind:
        raise OptionError(
            "hf_overrides: rope_theta: the rope_parameters of this model are by kinds of layers. Give rope_parameters."
        )
    return {**rope, "rope_theta": overrides["rope_theta"]}


def _make(folder: Path, path: Path, names: list[str], text: str) -> None:
    """Whole or not at all: other programs may be at it."""
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".part"))
    try:
        (unfinished / _CONFIG).write_text(text, encoding="utf-8")
        for name in names:
            (unfinished / name).symlink_to(path / name)
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():
            raise
