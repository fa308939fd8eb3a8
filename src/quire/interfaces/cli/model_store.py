"""The models that were fetched from the hub: its client's cache, which Quire shares with Transformers.

Knows the cache by its client alone, so that nothing outside it can be meant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from quire.config.engine_options import EMBEDDED
from quire.config.model_source import embedded_path
from quire.errors import OptionError

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What `quire list` says of one."""

    name: str
    num_bytes: int
    # a date
    changed: str


def embedded_model() -> StoredModel:
    """The one in the package."""
    files = [file.stat() for file in embedded_path().iterdir() if file.is_file()]
    return StoredModel(EMBEDDED, sum(file.st_size for file in files), _date(max(file.st_mtime for file in files)))


def stored_models() -> list[StoredModel]:
    """By name. Data sets, and repositories without weights that could be loaded, are not among them."""
    cache = _cache()
    if cache is None:
        return []
    return sorted((_model(repo) for repo in cache.repos if _is_model(repo)), key=lambda model: model.name)


def remove(model: StoredModel) -> None:
    """All its revisions, and what is left of a download. Raises OptionError if it is still there afterwards."""
    cache = _cache()
    repos = () if cache is None else [repo for repo in cache.repos if _is_model(repo) and repo.repo_id == model.name]
    for repo in repos:
        # alone, because a copy of it under another name has revisions of the same names
        alone = replace(cache, repos=frozenset({repo}))
        alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
        if repo.repo_path.exists():
            # the hub's client only logs why
            raise OptionError(f"NAME {model.name}: {repo.repo_path} could not be deleted. Delete it as its owner.")


def in_words(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _cache() -> Any:
    # imported here: the hub's client takes long to import
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _is_model(repo: Any) -> bool:
    names = [file.file_name for revision in repo.revisions for file in revision.files]
    return repo.repo_type == "model" and any(name.endswith(_WEIGHTS) for name in names)


def _model(repo: Any) -> StoredModel:
    return StoredModel(repo.repo_id, repo.size_on_disk, _date(repo.last_modified))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()
