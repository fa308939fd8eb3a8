"""Tiny checkpoints of models that take images: a decoder, an encoder and a processor's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from quire.testing.tiny_checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, widen, write_tokenizer

MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
IMAGE_TOKEN_ID = 259
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "fullatt_block_indexes": [1], "window_size": 56,
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen3_vl": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
_MORE_TEXT: dict[str, dict[str, Any]] = {"qwen3_vl": {"head_dim": 16, "num_hidden_layers": 3}}
_NUMBERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "patch_size": 16, "min_pixels": 64 * 64, "max_pixels": 32 * 32 * 64, "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
}  # fmt: skip


def make_image_checkpoint(path: Path, model_type: str = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """A checkpoint directory with tokenizer and preprocessor_config.json; returns its path."""
    model = make_image_model(model_type, seed=seed)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path, chat_template=CHAT_TEMPLATE, more_special=MARKS)
    numbers = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64, "patch_size": 14, "merge_size": 2}
    numbers |= _NUMBERS.get(model_type, {})
    (path / "preprocessor_config.json").write_text(json.dumps(numbers), encoding="utf-8")
    return path


def make_image_model(model_type: str = "qwen2_5_vl", *, seed: int = 0) -> Any:
    """The Transformers model itself, with wide random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        model_type,
        text_config=_TEXT | _MORE_TEXT.get(model_type, {}),
        vision_config=_VISION[model_type],
        image_token_id=IMAGE_TOKEN_ID,
        vision_start_token_id=IMAGE_TOKEN_ID + 1,
        vision_end_token_id=IMAGE_TOKEN_ID + 2,
        video_token_id=IMAGE_TOKEN_ID + 3,
        tie_word_embeddings=False,
        eos_token_id=EOS_TOKEN_ID,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    widen(model, seed)
    return model.eval()
