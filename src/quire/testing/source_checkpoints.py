"""Tiny checkpoints of models that read a text and write another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quire.testing.tiny_checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, widen, write_tokenizer

START = 3
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": START,
    "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0,
}  # fmt: skip
# of each kind the model_type, and what differs from the sizes above
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {"num_decoder_layers": 3}),
    "t5 v1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {"tie_word_embeddings": False}),
    "umt5": ("umt5", {"feed_forward_proj": "gated-gelu"}),
}


def make_source_checkpoint(path: Path, kind: str = "t5", *, seed: int = 0) -> Path:
    """A checkpoint directory with a tokenizer, as it was published: heads of v1.1 have weights of their own."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    model = make_source_model(kind, seed=seed)
    tied = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    if model.lm_head.weight is model.shared.weight:
        tied.add("lm_head.weight")
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    model_type, changes = KINDS[kind]
    config = {**_SIZES, **changes, "model_type": model_type, "architectures": [type(model).__name__]}
    (path / "config.json").write_text(json.dumps({**config, "n_positions": 96}), encoding="utf-8")
    write_tokenizer(path, chat_template=None)
    return path


def make_source_model(kind: str = "t5", *, seed: int = 0) -> Any:
    """The Transformers model itself, with wide random weights."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    model_type, changes = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **{**_SIZES, **changes})
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        if changes.get("tie_word_embeddings") is False:
            # as Transformers leaves it where a file has weights for it
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    widen(model, seed)
    if model.lm_head.weight is model.shared.weight:
        # what is scaled before the head would leave all tokens about as likely
        with torch.no_grad():
            model.decoder.final_layer_norm.weight.mul_(8)
    return model.eval()
