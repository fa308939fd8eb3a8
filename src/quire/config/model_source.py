"""Where a model is: inside the package, in a directory, or on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.config.engine_options import EMBEDDED
from quire.config.gguf_file import is_gguf
from quire.errors import ModelError

EMBEDDED_DRAFT = "embedded-draft"

# A kind of GGUF file may follow: most repositories of them hold a dozen.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_WHAT = "Give a Hugging Face checkpoint directory, a GGUF file, or a hub name."
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def embedded_path() -> Path:
    """The checkpoint that ships with the package."""
    return Path(__file__).resolve().parent.parent / "embedded"


def embedded_draft_path() -> Path:
    """A small model that drafts for the embedded one; it has no tokenizer of its own."""
    return Path(__file__).resolve().parent.parent / "embedded_draft"


def locate(model: str, revision: str | None = None, *, name: str = "model", load_format: str = "auto") -> Path:
    """The directory of a model, or its GGUF file; what is neither is downloaded from the hub. `name` is the option in
    messages."""
    if model == EMBEDDED:
        return embedded_path()
    if not model.strip():
        raise ModelError(f"{name}={model!r}: must not be empty. {_WHAT}")
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        return _choose(path.resolve(), load_format)
    if path.is_file():
        if is_gguf(path):
            return _checked_file(path.resolve(), load_format)
        if path.suffix == ".gguf":
            raise ModelError(f"{name}={model}: does not begin as a GGUF file does. Download it again.")
        raise ModelError(f"{name}={model}: is a file. Give the directory that holds it: {path.parent}.")
    looks_like_path = (
        model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix in {".gguf", ".safetensors"}
    )
    if path.exists() or looks_like_path or not _HUB_NAME.fullmatch(model):
        raise ModelError(f"{name}={model}: no such directory. {_WHAT}")
    repository, _, file_type = model.partition(":")
    return _choose(_download(repository, revision, name, file_type, load_format), load_format, file_type)


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub, which is downloaded as far as it is not here."""
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        what = "it is here already" if Path(name).exists() else "that is no name of the hub"
        raise ModelError(f"{name[:200]}: {what}. Give a name such as Qwen/Qwen3-0.6B.")
    repository, _, file_type = name.partition(":")
    return _download(repository, revision, "NAME", file_type)


def _checked_file(path: Path, load_format: str) -> Path:
    if load_format == "safetensors":
        raise ModelError(f"load_format=safetensors: {path.name} is a GGUF file. Leave it out, or set load_format=gguf.")
    return path


def _choose(path: Path, load_format: str, file_type: str = "") -> Path:
    """The directory, or the GGUF file in it: if asked for, or if there is nothing else to load."""
    if load_format in ("safetensors", "pt", "dummy") and (path / "config.json").is_file():
        return path
    if load_format in ("auto", "dummy") and not file_type and any(path.glob("*.safetensors")):
        return path
    wanted = file_type.lower()
    found = sorted(
        file
        for file in path.glob("*.gguf")
        # Files after the first of several, and the vision half of a model, are none to begin with.
        if not _LATER_PART.search(file.name) and "mmproj" not in file.name and wanted in file.name.lower()
    )
    if len(found) == 1 and load_format != "safetensors":
        return found[0]
    if found and load_format != "safetensors":
        names = ", ".join(file.name for file in found[:6])
        raise ModelError(f"{path}: holds {len(found)} models in GGUF ({names}). Give the path of one of them.")
    if load_format == "gguf" or file_type:
        raise ModelError(f"{path}: no GGUF file{f' of the kind {file_type}' if file_type else ''} there.")
    return path


def _download(model: str, revision: str | None, name: str, file_type: str = "", load_format: str = "auto") -> Path:
    # imported here: the hub's client takes longer to import than the whole of `import quire`
    from httpx2 import TransportError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        files = _gguf_patterns(file_type) if file_type else _HUB_FILES
        if load_format == "pt":
            files = [*files, "*.bin"]
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{name}={model}: neither a directory here nor a model on the hub. "
            "Check the name; for a private or gated model set HF_TOKEN."
        ) from error
    except TransportError as error:
        raise ModelError(
            f"{name}={model}: the connection to the hub broke ({type(error).__name__}). Start it again: what came "
            "whole is kept."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name}={model}: no such directory, and the hub could not be asked ({type(error).__name__}). "
            "Check the path, or the connection; downloaded models also work offline."
        ) from error


def _gguf_patterns(file_type: str) -> list[str]:
    """`:Q4_K_M` stands for every file with that in its name, in either spelling."""
    return [f"*{spelling}*.gguf" for spelling in dict.fromkeys((file_type, file_type.lower(), file_type.upper()))]
