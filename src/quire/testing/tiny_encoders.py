"""Tiny checkpoints with random weights of models that make no tokens: encoders, and heads of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.testing.tiny_checkpoints import widen, write_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
_MODERN = {"local_attention": 16, "global_attn_every_n_layers": 2, "pad_token_id": 0}
# name -> (model_type, what differs from _SIZES)
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 130}),
    "xlm_roberta": ("xlm-roberta", {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 130}),
    "modernbert": ("modernbert", _MODERN),
    "modernbert_mean": ("modernbert", {**_MODERN, "classifier_pooling": "mean", "norm_bias": True, "mlp_bias": True}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
}
ENCODERS = ("bert", "roberta", "xlm_roberta", "modernbert")
CLASSIFIERS = ("bert", "roberta", "modernbert", "modernbert_mean", "llama", "qwen3")


def make_encoder(path: Path, name: str, *, is_classifier: bool = False, num_labels: int = 3, **changes: Any) -> Path:
    """A directory that Transformers and Quire both load: a backbone, or a head of labels."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    model_type, own = _KINDS[name]
    labels = {} if "id2label" in changes else {"num_labels": num_labels}
    config = AutoConfig.for_model(model_type, **{**_SIZES, **own, **labels, **changes})
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    model = kind.from_config(config, dtype=torch.float32)
    widen(model, 0)
    model.eval().save_pretrained(path)
    write_tokenizer(path, chat_template=None)
    return path


def write_pair_tokenizer(path: Path) -> Path:
    """BERT's: letters are tokens, and a second text is of another kind."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    BertTokenizerFast(tokenizer_object=backend).save_pretrained(path)
    return path
