"""RoBERTa: BERT without kinds of tokens, whose positions are counted from behind the padding token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.worker.layers import ReplicatedLinear
from quire.worker.models.bert import CONFIG_DEFAULTS, BertModel, bert_map, check_is_encoder
from quire.worker.models.encoder import Encoder, num_labels_of

_DEFAULTS = {
    **CONFIG_DEFAULTS,
    "vocab_size": 50_265,
    "pad_token_id": 1,
}


class RobertaEncoder(Encoder):
    architectures: tuple[str, ...] = ("RobertaModel", "RobertaForMaskedLM")
    checkpoint_map = bert_map("roberta", "lm_head.", "roberta.pooler.", "pooler.")
    config_defaults = _DEFAULTS
    complete_config = staticmethod(check_is_encoder)

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(BertModel(config, config.pad_token_id + 1))


class RobertaHead(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size)
        self.out_proj = ReplicatedLinear(config.hidden_size, num_labels_of(config))

    def forward(self, pooled: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(pooled)))


class RobertaClassifier(RobertaEncoder):
    architectures = ("RobertaForSequenceClassification",)
    checkpoint_map = bert_map("roberta", "roberta.pooler.")

    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.classifier = RobertaHead(config)

    def classify(self, pooled: Tensor) -> Tensor:
        logits: Tensor = self.classifier(pooled)
        return logits


MODEL = RobertaEncoder
CLASSIFIER = RobertaClassifier
