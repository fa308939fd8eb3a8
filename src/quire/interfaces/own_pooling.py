"""How the authors of a model make a vector of a text: what they wrote down for the library sentence-transformers.

    modules.json             the parts of the model: Transformer, Pooling, perhaps Dense, Normalize; or LogitScore
    1_Pooling/config.json    which hidden states become the vector
    2_Dense/...              a layer that the pooled vector goes through
    1_LogitScore/...         two tokens between which a model that compares two texts decides
    config_sentence_transformers.json    what stands before a text, by what the text is for

Nothing is checked at start, because most models of which this is read are asked for texts alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ModelError, RequestError, one_line
from quire.json_files import read_bytes
from quire.pooling_params import CLS, LAST, MEAN

_BY_MODE = {"lasttoken": LAST, "mean": MEAN, "mean_tokens": MEAN, "cls": CLS, "cls_token": CLS}
_KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
_LOGIT_SCORE = "LogitScore"
_WEIGHTS = "model.safetensors"
# of what a file says, in a message
_MOST_SHOWN = 100


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling, and tanh where it has one."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    has_tanh: bool

    def __call__(self, vector: NDArray[Any]) -> NDArray[Any]:
        if len(vector) != self.weight.shape[1]:
            raise RequestError(
                f"This model's embeddings go through a layer of {self.weight.shape[1]} inputs (modules.json), and its "
                f"vectors have {len(vector)} numbers. Give pooling=last or pooling=mean for them as they are.",
                param="model",
            )
        product: NDArray[Any] = self.weight @ vector
        if self.bias is not None:
            product = product + self.bias
        if self.has_tanh:
            product = np.tanh(product)
        return product


@dataclass(frozen=True)
class OwnPooling:
    """What is done with hidden states where a request says nothing."""

    how: str
    dense: tuple[Dense, ...] = ()
    normalizes: bool = True


def own_pooling(path: Path, default: str = LAST) -> OwnPooling:
    """Of a checkpoint's directory; `default` where nobody says otherwise. RequestError for what is not built."""
    if path.is_file():
        return OwnPooling(default)
    folder = "1_Pooling"
    dense: list[Dense] = []
    modules = modules_of(path)
    for kind, where in modules:
        if kind not in _KNOWN_MODULES:
            raise RequestError(
                f"This model's embeddings need a part of the kind {kind[:_MOST_SHOWN]} (modules.json), and only "
                f"{', '.join(_KNOWN_MODULES)} are computed here. Give pooling=last or pooling=mean for the hidden "
                "states of its language model.",
                param="model",
            )
        if kind == "Pooling":
            folder = where or folder
        if kind == "Dense":
            dense.append(_read_dense(path / where))
    kinds = [kind for kind, _ in modules]
    return OwnPooling(_mode(path / folder / "config.json", default), tuple(dense), not kinds or "Normalize" in kinds)


def own_label_tokens(path: Path, vocab_size: int) -> list[int] | None:
    """(no, yes) of a model that compares texts by what comes next; None: it is no such model."""
    if path.is_file():
        return None
    for kind, where in modules_of(path):
        if kind == _LOGIT_SCORE:
            config = _read(path / where / "config.json", dict)
            tokens = [config.get("false_token_id"), config.get("true_token_id")]
            if all(type(token) is int and 0 <= token < vocab_size for token in tokens):
                return tokens
            raise RequestError(
                f"This model's texts are compared by the tokens {str(tokens)[:_MOST_SHOWN]} "
                f"({where[:_MOST_SHOWN]}/config.json), and two of its {vocab_size:,} are needed: false_token_id and "
                "true_token_id.",
                param="model",
            )
    return None


def own_prompts(path: Path) -> dict[str, str]:
    """What stands before a text, by what the text is for."""
    if path.is_file():
        return {}
    hint = "Send texts without a type (input_type), with all that is to stand before them."
    prompts = _read(path / "config_sentence_transformers.json", dict, hint).get("prompts")
    if not isinstance(prompts, dict):
        return {}
    return {name: prompt for name, prompt in prompts.items() if isinstance(prompt, str)}


def modules_of(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of the parts that the file names; a folder outside of the model's own is none."""
    found = []
    for module in _read(path / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else str(module)
        where = str(module.get("path") or "") if isinstance(module, dict) else ""
        if ".." in Path(where).parts or Path(where).is_absolute():
            where = ""
        found.append((kind, where))
    return found


def _mode(file: Path, default: str) -> str:
    """Older files have a switch for each mode, newer ones a name."""
    config = _read(file, dict)
    if not config:
        return default
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else []
    modes += [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    modes = [mode for mode in modes if mode not in ("include_prompt",)]
    found = {_BY_MODE.get(mode) for mode in modes}
    if len(found) == 1 and None not in found:
        return str(found.pop())
    shown = " and ".join(modes)[:_MOST_SHOWN]
    raise RequestError(
        f"This model's embeddings are pooled by {shown or 'nothing'} (1_Pooling/config.json), and only "
        "lasttoken, mean_tokens and cls_token are computed here. Give pooling=last or pooling=mean.",
        param="model",
    )


def _read_dense(folder: Path) -> Dense:
    from safetensors import safe_open

    activation = str(_read(folder / "config.json", dict).get("activation_function", "")).rpartition(".")[2]
    try:
        if activation not in ("Identity", "Tanh"):
            raise ValueError(f"its activation is {activation or 'unknown'}, and Identity and Tanh are built")
        with safe_open(folder / _WEIGHTS, framework="np") as file:
            weight = file.get_tensor("linear.weight").astype(np.float32)
            has_bias = "linear.bias" in file.keys()  # noqa: SIM118 - it is no dictionary
            bias = file.get_tensor("linear.bias").astype(np.float32) if has_bias else None
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError("its tensors are no matrix and a bias for each of its outputs")
        if not np.isfinite(weight).all() or (bias is not None and not np.isfinite(bias).all()):
            raise ValueError("it holds infinities or NaN")
        return Dense(weight, bias, activation == "Tanh")
    # whatever a file that is no such file makes of it
    except Exception as error:
        raise RequestError(
            f"This model's embeddings go through {folder.name[:_MOST_SHOWN]}, which cannot be read "
            f"({type(error).__name__}: {one_line(error)[:300]}). "
            f"It must have {_WEIGHTS} with linear.weight in float32 or float16.",
            param="model",
        ) from error


def _read(file: Path, kind: type[Any], hint: str = "Give pooling=last or pooling=mean.") -> Any:
    """Empty where there is none; a broken file counts as none of its kind."""
    try:
        if not file.is_file():
            return kind()
        content = json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError, ModelError) as error:
        raise RequestError(
            f"{file.name} of this model cannot be read ({type(error).__name__}), so what its authors want is not "
            f"known. {hint}",
            param="model",
        ) from error
    return content if isinstance(content, kind) else kind()
