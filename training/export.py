"""Writes the checkpoint in the Hugging Face format. Each file is replaced whole, so a reader never sees half of one."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from training.model import Shape
from training.render import TEMPLATE
from training.tokenizer import END, END_OF_TEXT, SPECIAL


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def generation_config() -> dict[str, object]:
    return {
        "bos_token_id": END_OF_TEXT, "eos_token_id": [END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False,
    }  # fmt: skip


def tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[END_OF_TEXT],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def export(target: Path, shape: Shape, weights: dict[str, torch.Tensor], tokenizer: Tokenizer | None = None) -> None:
    """All files are written beside the target first and then moved over it, the weights last.

    Without a tokenizer there is none in the folder: a draft is read by its target's.
    """
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".export-", dir=target))
    documents = {"config.json": config(shape), "generation_config.json": generation_config()}
    try:
        if tokenizer is not None:
            documents["tokenizer_config.json"] = tokenizer_config(shape)
            tokenizer.save(str(scratch / "tokenizer.json"))
            shutil.copyfile(TEMPLATE, scratch / "chat_template.jinja")
        for name, content in documents.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        half = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
        save_file(half, scratch / "model.safetensors", metadata={"format": "pt"})
        for name in sorted(os.listdir(scratch), key=lambda name: name.endswith(".safetensors")):
            (scratch / name).chmod(0o644)
            os.replace(scratch / name, target / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
