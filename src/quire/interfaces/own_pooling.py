"""How the authors of a model make a vector of a text: what they wrote down for the library sentence-transformers.

    modules.json             the parts of the model: Transformer, Pooling, perhaps Normalize
    1_Pooling/config.json    which hidden states become the vector

Nothing is checked at start, because most models of which this is read are asked for texts alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import RequestError
from quire.pooling_params import LAST, MEAN

_BY_MODE = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN}
# Normalize is always done unless the request says otherwise.
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def own_pooling(path: Path) -> str:
    """Of a checkpoint's directory; the last token where nobody says otherwise. RequestError for what is not built."""
    if path.is_file():
        return LAST
    folder = "1_Pooling"
    for module in _read(path / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _KNOWN_MODULES:
            raise RequestError(
                f"This model's embeddings need a part of the kind {kind or module} (modules.json), and only "
                f"{', '.join(_KNOWN_MODULES)} are computed here. Give pooling=last or pooling=mean for the hidden "
                "states of its language model.",
                param="model",
            )
        if kind == "Pooling":
            folder = str(module.get("path") or folder)
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        folder = "1_Pooling"
    return _mode(path / folder / "config.json")


def _mode(file: Path) -> str:
    """Older files have a switch for each mode, newer ones a name."""
    config = _read(file, dict)
    if not config:
        return LAST
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else []
    modes += [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    modes = [mode for mode in modes if mode not in ("include_prompt",)]
    found = {_BY_MODE.get(mode) for mode in modes}
    if len(found) == 1 and None not in found:
        return str(found.pop())
    raise RequestError(
        f"This model's embeddings are pooled by {' and '.join(modes) or 'nothing'} (1_Pooling/config.json), and only "
        "lasttoken and mean_tokens are computed here. Give pooling=last or pooling=mean.",
        param="model",
    )


def _read(file: Path, kind: type[Any]) -> Any:
    """Empty where there is none; a broken file counts as none of its kind."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{file.name} of this model cannot be read ({type(error).__name__}), so its pooling is not known. Give "
            "pooling=last or pooling=mean.",
            param="model",
        ) from error
    return content if isinstance(content, kind) else kind()
