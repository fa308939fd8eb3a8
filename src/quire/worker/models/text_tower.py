"""A checkpoint that sees or hears, of which the text model alone is served.

Owns: which part of config.json is that of the text, and how its tensors are called in the whole checkpoint. Called by
`model_loader.py` where the whole has no file here and Transformers does not run it under Quire's attention.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire.config import ModelFacts
from quire.errors import ModelError
from quire.worker.models.checkpoint_map import CheckpointMap

# what the whole says of its text
_SHARED = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
# Tensors of the text model in the whole: as Transformers saves them today, before its fifth version, and with the head
# outside. What is not among them belongs to other parts.
PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "text_model.model.": "model.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
    "lm_head.": "lm_head.",
}
# Tokens of images see each other there, and those of the prompt behind them as well.
_NOT_CAUSAL = ("paligemma",)


@dataclass(frozen=True)
class TextTower:
    """The text model of a checkpoint."""

    whole: str
    facts: ModelFacts

    @classmethod
    def of(cls, facts: ModelFacts) -> TextTower | None:
        """None where there is no text model with a kind of its own."""
        inner = facts.hf_config.get("text_config") or facts.hf_config.get("llm_config")
        if not isinstance(inner, dict) or not isinstance(inner.get("model_type"), str):
            return None
        if facts.model_type in _NOT_CAUSAL:
            raise ModelError(
                f"model_type={facts.model_type}: its text model is not causal by itself: tokens of a prompt see those "
                "behind them. Take a decoder-only model."
            )
        shared = {name: facts.hf_config[name] for name in _SHARED if name in facts.hf_config}
        values = {name: value for name, value in {**inner, **shared}.items() if name != "architectures"}
        return cls(
            facts.model_type,
            dataclasses.replace(facts, model_type=inner["model_type"], architecture="", hf_config=values),
        )

    @property
    def remark(self) -> str:
        return (
            f"model_type={self.whole}: its text model ({self.facts.model_type}) is served; images, sound and video are "
            "not taken"
        )


def map_of_tower(of_text: CheckpointMap) -> TowerMap:
    """The table of the text model for the files of the whole checkpoint."""
    return TowerMap(**{field.name: getattr(of_text, field.name) for field in dataclasses.fields(of_text)})


class TowerMap(CheckpointMap):
    """Names of the whole become those of the text model, and what has no such name means nothing."""

    def ignores(self, name: str) -> bool:
        own = name_in_tower(name)
        return own is None or super().ignores(own)

    def rename(self, name: str) -> str:
        own = name_in_tower(name)
        return name if own is None else super().rename(own)


def name_in_tower(name: str) -> str | None:
    """What the text model calls it; None: it belongs to another part."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None
