"""GGUF files made out of small plain checkpoints, by the package `gguf`: its writer, its quantisers, its arithmetic.

What a writer returns are the weights that the file stands for, as that package computes them, under the names of the
plain checkpoint. For types that it can read and not make, blocks of random codes are written instead, with scales that
give weights of a usual size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.support.gguf_layouts import ARCHITECTURES, entries, metadata
from torch import Tensor

Weights = dict[str, Tensor]
# Bytes of a block that hold float16 scales, each with a factor; the other bytes are codes. Where codes are positive and
# a minimum is taken off, the factor of the minimum leaves weights around zero.
_SCALES_AT: dict[str, dict[int, float]] = {
    "Q2_K": {80: 1.0, 82: 1.5}, "Q3_K": {108: 1.0}, "Q4_K": {0: 1.0, 2: 7.5}, "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0}, "IQ4_NL": {0: 1.0}, "IQ4_XS": {0: 1.0}, "IQ2_XXS": {0: 1.0}, "IQ3_S": {0: 1.0},
}  # fmt: skip
_STD = 0.25


def write_gguf(
    path: Path,
    source: Path,
    type_of: str | Callable[[str], str] = "Q8_0",
    *,
    pre: str = "gpt-2",
    whole_tokenizer: bool = False,
    changes: dict[str, Any] | None = None,
    vectors: dict[str, Any] | None = None,
    layout: str = "stacked",
) -> Weights:
    """`type_of`: the type of each matrix, by its name in GGUF. Vectors are F32, as in every such file.

    whole_tokenizer: tokenizer.json as it is, instead of its parts. changes: metadata to set, or to leave out (None).
    vectors: further tensors. layout: of experts and latent attention (`gguf_layouts.entries`).
    """
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture, is_interleaved = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    values = metadata(config, layout) | _tokenizer(source, pre, whole=whole_tokenizer) | (changes or {})
    for key, value in values.items():
        _add(writer, key, value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    for entry in entries(tensors, config, layout):
        part = entry.name.split(".")[-2]
        size = heads[part] if is_interleaved and part in heads else 0
        value = entry.value
        array = (_in_pairs(value, size) if size else value).numpy()
        if entry.is_float:
            writer.add_tensor(entry.name, array)
            continue
        kind = type_of if isinstance(type_of, str) else type_of(entry.name)
        data, meaning = _stored(np.ascontiguousarray(array), kind)
        raw_dtype = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(entry.name, data, raw_dtype=raw_dtype)
        entry.write_back(_in_halves(torch.from_numpy(meaning), size) if size else torch.from_numpy(meaning))
    for name, vector in (vectors or {}).items():
        writer.add_tensor(name, np.asarray(vector, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim > 1}


def random_blocks(kind: str, count: int, seed: int = 0) -> Any:
    """Blocks of a type, as bytes [count, bytes of a block], whose weights are about as large as usual ones."""
    import gguf

    rng = np.random.default_rng(seed)
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)

    def scaled(size: float) -> Any:
        for place, factor in _SCALES_AT[kind].items():
            scales = (rng.uniform(0.9, 1.1, count) * size * factor).astype(np.float16)
            blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])

    spread = float(np.std(scaled(1e-2)))
    scaled(1e-2 * _STD / spread)
    return blocks.reshape(count, block_bytes)


def _stored(array: Any, kind: str) -> tuple[Any, Any]:
    """The bytes of a matrix in a type, and the numbers that they stand for."""
    import gguf

    if kind == "F32":
        return array, array
    if kind == "F16":
        return array.astype(np.float16), array.astype(np.float16).astype(np.float32)
    qtype = gguf.GGMLQuantizationType[kind]
    per_block, _ = gguf.GGML_QUANT_SIZES[qtype]
    if kind in _SCALES_AT:
        num_blocks = array.size // per_block
        data = random_blocks(kind, num_blocks, seed=num_blocks).reshape(*array.shape[:-1], -1)
    else:
        data = gguf.quantize(array, qtype)
    return data, gguf.dequantize(data, qtype).reshape(array.shape)


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows i and i + half of each head become neighbours."""
    size = weight.shape[0] // heads
    return torch.cat(
        [weight[head * size + place + half * (size // 2)][None]
         for head in range(heads) for place in range(size // 2) for half in range(2)]
    )  # fmt: skip


def _in_halves(weight: Tensor, heads: int) -> Tensor:
    """The way back."""
    size = weight.shape[0] // heads
    return torch.cat(
        [weight[head * size + 2 * place + half][None]
         for head in range(heads) for half in range(2) for place in range(size // 2)]
    )  # fmt: skip


def _tokenizer(source: Path, pre: str, *, whole: bool) -> dict[str, Any]:
    file = source / "tokenizer.json"
    if not file.is_file():
        return {"tokenizer.ggml.model": "no_vocab"}
    text = file.read_text(encoding="utf-8")
    content, settings = json.loads(text), json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocabulary = dict(content["model"]["vocab"])
    added = {token["content"]: token for token in content["added_tokens"]}
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"].get("merges", [])]
    template = source / "chat_template.jinja"
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges or None,
        "tokenizer.ggml.add_bos_token": bool(settings.get("add_bos_token")),
        "tokenizer.chat_template": template.read_text(encoding="utf-8") if template.is_file() else None,
        "tokenizer.huggingface.json": text if whole else None,
    }
    for name in ("bos", "eos"):
        if settings.get(f"{name}_token") in vocabulary:
            found[f"tokenizer.ggml.{name}_token_id"] = vocabulary[settings[f"{name}_token"]]
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
