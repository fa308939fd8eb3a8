"""Where a model is: inside the package, in a directory, or on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from quire.config.engine_options import EMBEDDED
from quire.errors import ModelError

EMBEDDED_DRAFT = "embedded-draft"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def embedded_path() -> Path:
    """The checkpoint that ships with the package."""
    return Path(__file__).resolve().parent.parent / "embedded"


def embedded_draft_path() -> Path:
    """A small model that drafts for the embedded one; it has no tokenizer of its own."""
    return Path(__file__).resolve().parent.parent / "embedded_draft"


def locate(model: str, revision: str | None = None, *, name: str = "model") -> Path:
    """The directory of a model; downloads it from the hub if it is no directory. `name` is the option in messages."""
    if model == EMBEDDED:
        return embedded_path()
    if not model.strip():
        raise ModelError(
            f"{name}={model!r}: must not be empty. Give a Hugging Face checkpoint directory or a hub name."
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    looks_like_path = (
        model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix in {".gguf", ".safetensors"}
    )
    if path.is_file():
        raise ModelError(f"{name}={model}: is a file. Give the directory that holds it: {path.parent}.")
    if path.exists() or looks_like_path or not _HUB_NAME.fullmatch(model):
        raise ModelError(f"{name}={model}: no such directory. Give a Hugging Face checkpoint directory or a hub name.")
    return _download(model, revision, name)


def _download(model: str, revision: str | None, name: str) -> Path:
    # imported here: the hub's client takes longer to import than the whole of `import quire`
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}={model}: neither a directory here nor a model on the hub. "
            "Check the name; for a private or gated model set HF_TOKEN."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name}={model}: no such directory, and the hub could not be asked ({type(error).__name__}). "
            "Check the path, or the connection; downloaded models also work offline."
        ) from error
