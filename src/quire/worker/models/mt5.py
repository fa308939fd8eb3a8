"""mT5: T5 v1.1 for many languages."""

from __future__ import annotations

from quire.worker.models.t5 import T5ForConditionalGeneration

SIZES = {"vocab_size": 250_112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    architectures = ("MT5ForConditionalGeneration",)
    config_defaults = {**T5ForConditionalGeneration.config_defaults, **SIZES}
    has_scale = False


MODEL = MT5ForConditionalGeneration
