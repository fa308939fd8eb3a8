"""What config.json says elsewhere, from the metadata of a GGUF file.

What a file says and a model's file here does not know is refused, because a model that runs with half of its settings
gives wrong text without a word. Called by `model_facts.py`.
"""

from __future__ import annotations

import struct
from typing import Any

from quire.config.gguf_architectures import ARCHITECTURES, find_architecture
from quire.config.gguf_file import GGUFFile, GGUFTensor
from quire.config.gguf_values import GGUFValues
from quire.errors import ModelError

# key without the architecture -> key of config.json
_NUMBERS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
# Settings that change what a model computes; a file may only have the value that means "no".
_REFUSED = {
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
_PLAIN_TYPES = {"F32": "float32", "F64": "float32", "BF16": "bfloat16"}


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The content that config.json would have."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture={architecture!r} is not among {', '.join(ARCHITECTURES)}, which are "
            "read from GGUF. Take the model as safetensors."
        )
    read = GGUFValues(file, architecture)
    for key, harmless in _REFUSED.items():
        value = read.optional(key, harmless)
        if value != harmless:
            raise ModelError(f"{file.path}: {read.name(key)}={value} is not supported for GGUF files yet.")
    found = find_architecture(architecture, read)
    config: dict[str, Any] = {name: read.whole(key) for key, name in _NUMBERS.items()}
    if config["num_hidden_layers"] > len(file.tensors):
        raise ModelError(
            f"{file.path}: {read.name('block_count')}={config['num_hidden_layers']}, but it has {len(file.tensors)} "
            "tensors in all. Compare its size with the source; download it again."
        )
    embedding = _matrix(file, "token_embd.weight")
    config |= {
        "model_type": found.model_type,
        "architectures": [found.class_name],
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": read.whole("attention.head_count_kv", config["num_attention_heads"]),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": read.count("attention.sliding_window") or None,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "torch_dtype": _dtype_of(file),
        "quantization_config": {"quant_method": "gguf"},
    }
    heads = config["num_attention_heads"]
    config["head_dim"] = read.whole("attention.key_length", max(1, config["hidden_size"] // heads))
    if read.has("context_length"):
        config["max_position_embeddings"] = read.whole("context_length")
    config["rope_parameters"] = _rope(file, read, config)
    return config | found.settings(read, config) | _end_tokens(file)


def _dtype_of(file: GGUFFile) -> str:
    """The type of what is not quantised: norms are always float32, so the largest weights decide."""
    weights = [tensor for tensor in file.tensors.values() if len(tensor.shape) >= 2]
    largest = max(weights, key=lambda tensor: tensor.num_elements)
    return _PLAIN_TYPES.get(largest.type_name, "float16")


def _rope(file: GGUFFile, read: GGUFValues, config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": read.number("rope.freq_base", 10_000.0)}
    rotary_dim = read.whole("rope.dimension_count", config["head_dim"])
    if rotary_dim != config["head_dim"]:
        rope["partial_rotary_factor"] = rotary_dim / config["head_dim"]
    kind = read.optional("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": read.number("rope.scaling.factor", 1.0)}
    elif kind != "none":
        raise ModelError(
            f"{file.path}: {read.name('rope.scaling.type')}={kind} is not supported, only linear and yarn."
        )
    if kind == "yarn":
        rope["original_max_position_embeddings"] = read.whole(
            "rope.scaling.original_context_length", config.get("max_position_embeddings", 0)
        )
        names = {
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
            "yarn_attn_factor": "attention_factor",
        }
        rope |= {
            name: read.number(f"rope.scaling.{key}") for key, name in names.items() if read.has(f"rope.scaling.{key}")
        }
    # Llama 3.1 and later: what the rope type "llama3" computes from four settings stands in the file as numbers.
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if kind != "none":
            raise ModelError(
                f"{file.path}: rope_freqs.weight beside {read.name('rope.scaling.type')}={kind} is not read."
            )
        rope |= {"rope_type": "factors", "factors": _floats(factors)}
    return rope


def _floats(tensor: GGUFTensor) -> list[float]:
    if tensor.type_name != "F32":
        raise ModelError(f"{tensor.file}: {tensor.name} is of type {tensor.type_name}, F32 is expected.")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.num_elements}f", file.read(tensor.num_bytes)))


def _end_tokens(file: GGUFFile) -> dict[str, Any]:
    """A chat ends its turns with eot, a text with eos: both end an answer."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    found = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    tokens: dict[str, Any] = {"eos_token_id": found} if found else {}
    start = file.metadata.get("tokenizer.ggml.bos_token_id")
    return tokens | ({"bos_token_id": start} if isinstance(start, int) else {})


def _matrix(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
        raise ModelError(
            f"{file.path}: no matrix {name} there. Is it an adapter, a vocabulary alone, or one of several files?"
        )
    return file.tensors[name]
