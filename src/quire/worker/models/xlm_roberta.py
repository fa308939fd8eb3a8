"""XLM-RoBERTa: RoBERTa with a vocabulary of many languages."""

from __future__ import annotations

from quire.worker.models.bert import CONFIG_DEFAULTS
from quire.worker.models.roberta import RobertaClassifier, RobertaEncoder

DEFAULTS = {**CONFIG_DEFAULTS, "pad_token_id": 1}


class XLMRobertaEncoder(RobertaEncoder):
    architectures = ("XLMRobertaModel", "XLMRobertaForMaskedLM")
    config_defaults = DEFAULTS


class XLMRobertaClassifier(RobertaClassifier):
    architectures = ("XLMRobertaForSequenceClassification",)
    config_defaults = DEFAULTS


MODEL = XLMRobertaEncoder
CLASSIFIER = XLMRobertaClassifier
