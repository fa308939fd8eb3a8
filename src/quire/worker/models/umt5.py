"""UMT5: every layer has a bias of its own."""

from __future__ import annotations

from quire.worker.models.mt5 import SIZES
from quire.worker.models.t5 import T5ForConditionalGeneration


class UMT5ForConditionalGeneration(T5ForConditionalGeneration):
    architectures = ("UMT5ForConditionalGeneration",)
    config_defaults = {**T5ForConditionalGeneration.config_defaults, **SIZES}
    shares_bias = False


MODEL = UMT5ForConditionalGeneration
