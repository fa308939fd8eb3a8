"""Gemma 4 as it is published: the text model, whose encoders of images and sound stay unread."""

from __future__ import annotations

from typing import Any

from quire.worker.models.gemma4_text import Gemma4ForCausalLM, complete_config


def complete_text(config: Any) -> None:
    """The keys of text stand in a `text_config` of their own."""
    for key, value in (getattr(config, "text_config", None) or {}).items():
        if key not in ("model_type", "architectures"):
            setattr(config, Gemma4ForCausalLM.config_names.get(key, key), value)
    complete_config(config)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    architectures = ("Gemma4ForConditionalGeneration", *Gemma4ForCausalLM.architectures)
    complete_config = staticmethod(complete_text)


MODEL = Gemma4ForConditionalGeneration
