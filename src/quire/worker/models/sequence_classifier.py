"""A decoder with a head of labels in the place of that of tokens: ...ForSequenceClassification."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.worker.layers import ReplicatedLinear
from quire.worker.models.causal_lm import CausalLM
from quire.worker.models.encoder import num_labels_of

CLASSIFIES = "ForSequenceClassification"
_GENERATES = "ForCausalLM"


def classifier_names(architectures: tuple[str, ...]) -> tuple[str, ...]:
    """What checkpoints of these decoders call themselves where they classify."""
    return tuple(f"{name.removesuffix(_GENERATES)}{CLASSIFIES}" for name in architectures if name.endswith(_GENERATES))


def classifier_of(decoder: type[CausalLM]) -> type[CausalLM]:
    """The class of such checkpoints. Their head takes the state of the last token, which has seen all others."""

    class SequenceClassifier(decoder):  # type: ignore[misc, valid-type]
        architectures = classifier_names(decoder.architectures)

        def __init__(self, config: Any, max_model_len: int) -> None:
            super().__init__(config, max_model_len)
            self.score = ReplicatedLinear(config.hidden_size, num_labels_of(config), bias=False)

        def classify(self, pooled: Tensor) -> Tensor:
            logits: Tensor = self.score(pooled)
            return logits

    SequenceClassifier.__name__ = SequenceClassifier.__qualname__ = SequenceClassifier.architectures[0]
    return SequenceClassifier
