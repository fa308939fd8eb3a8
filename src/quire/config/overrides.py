"""`hf_overrides`: other values for a model's config.json.

    <cache folder>/hf_overrides/<digest>/      config.json as it is meant, and links to all other files of the model

Whatever reads the model by its path, here, in a worker or in the Transformers library, reads the same values. A program
locks the folders that it uses, until it ends or has used many others. Whoever makes one deletes those that were used
longest ago and that nobody has locked, and nothing in which lies anything that was not put there by this.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.cache_folder import cache_folder, check_private
from quire.errors import OptionError, UserError, one_line
from quire.json_files import read_object

_CONFIG = "config.json"
# three spellings of how positions turn, of which the first is that of today
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
# folders that nobody uses and that are kept for the next start
_MOST_UNUSED = 16
# locked by this program; each takes a file descriptor
_MOST_LOCKED = 64
_OUR_NAMES = re.compile(r"[0-9a-f]{32}|\w+\.part")
# descriptors by folder, the one that was used last at the end
_locked: OrderedDict[Path, int] = OrderedDict()


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
    try:
        root = cache_folder() / "hf_overrides"
        folder = root / digest[:32]
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(root)
        with _lock_of(root) as is_alone:
            if not folder.is_dir():
                _make(folder, path, names, text)
            _keep(folder)
            if is_alone:
                _delete_unused(root)
    except OSError as error:
        raise OptionError(
            f"hf_overrides: a folder for the changed config.json cannot be made ({error}). Set QUIRE_CACHE_DIR to a "
            "folder that this program may write into."
        ) from error
    return folder


def keys_added_by(path: Path, overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Those that the model's own config.json does not have, each with its part, such as text_config.head_dim."""
    if not overrides or not (path / _CONFIG).is_file():
        return ()
    return tuple(_added(read_object(path / _CONFIG), overrides))


def _added(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    for name, value in overrides.items():
        if name not in config:
            yield name
        if _is_part(name) and isinstance(value, Mapping):
            inner = config.get(name)
            yield from (f"{name}.{key}" for key in _added(inner if isinstance(inner, Mapping) else {}, value))


def _is_part(name: str) -> bool:
    """Of the model, with a configuration of its own."""
    return name.endswith("_config") and name != "quantization_config"


def laid_over(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Values beside or instead of others; a part of the model (text_config) keeps those that are not named."""
    merged = {**config, **overrides}
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise OptionError(f"hf_overrides: {str(name)[:40]}: a name must be a text.")
        if _is_part(name) and isinstance(value, Mapping) and isinstance(config.get(name), Mapping):
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


# ---------------------------------------------------------------------------------------------------- the folders


def _make(folder: Path, path: Path, names: list[str], text: str) -> None:
    """Whole or not at all: where nothing can be locked, other programs may be at it."""
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


def _keep(folder: Path) -> None:
    """Nobody deletes it while this program runs, and it was used now. No need where the file system cannot do it."""
    if folder not in _locked:
        _locked[folder] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    _locked.move_to_end(folder)
    while len(_locked) > _MOST_LOCKED:
        os.close(_locked.popitem(last=False)[1])
    with contextlib.suppress(OSError):
        os.utime(folder)
        fcntl.flock(_locked[folder], fcntl.LOCK_SH)


def _delete_unused(root: Path) -> None:
    """All but those that were used last, and what programs that are gone have left unfinished."""
    ours = [folder for folder in root.iterdir() if _OUR_NAMES.fullmatch(folder.name)]
    ours.sort(key=lambda folder: folder.lstat().st_mtime, reverse=True)
    unfinished = [folder for folder in ours if folder.suffix]
    unused = [folder for folder in ours if not folder.suffix and not _is_locked(folder)]
    for folder in [*unfinished, *unused[_MOST_UNUSED:]]:
        with contextlib.suppress(OSError):
            _delete(folder)


def _delete(folder: Path) -> None:
    """Unless something lies in it that would be lost."""
    entries = list(folder.iterdir())
    if folder.is_symlink() or not all(entry.is_symlink() or entry.name == _CONFIG for entry in entries):
        return
    for entry in entries:
        entry.unlink()
    folder.rmdir()


def _is_locked(folder: Path) -> bool:
    with _lock_of(folder, fcntl.LOCK_NB) as is_mine:
        return not is_mine


@contextlib.contextmanager
def _lock_of(folder: Path, how: int = 0) -> Iterator[bool]:
    """Against all others, if it can be had."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        is_mine = True
    except OSError:
        is_mine = False
    try:
        yield is_mine
    finally:
        os.close(descriptor)
