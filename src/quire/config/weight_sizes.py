"""What the weights of a model weigh once they are loaded, quantised or not: for `quire plan`, before anything is read.

Pure functions of config.json (or a GGUF file's head) and of an option. A packed weight of 8 bits with one scale an
output has that scale in float32; groups have scales, and offsets where they are needed, in float16.
"""

from __future__ import annotations

from typing import Any

from quire.config.arithmetic import FLOAT_BYTES, ModelShape
from quire.config.gguf_file import GGUFFile
from quire.config.gguf_sizes import Form, gguf_bytes, gguf_embedding_bytes, gguf_expert_bytes, scheme_form
from quire.config.model_facts import ModelFacts
from quire.config.quantization import SCHEMES, declared_quantization, format_of
from quire.errors import OptionError

_MXFP4 = Form(4, 32, are_floats=True)
# 4-bit floats in groups of 16 are packed as codes of 6 bits; in float32 they are floats
_NVFP4 = Form(6, 16)


def weight_bytes(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> tuple[int, str]:
    """Bytes of all matrices, and in which form they are."""
    if scheme is not None and scheme not in SCHEMES:
        raise OptionError(f"quantization={scheme}: what its weights weigh is known for {', '.join(SCHEMES)} alone.")
    stored = format_of(facts.hf_config)
    if scheme is None and stored is None:
        return shape.weight_bytes(dtype), dtype
    if stored == "gguf":
        num_bytes = gguf_bytes(GGUFFile.read(facts.path), shape.latent, dtype, scheme)
        return num_bytes, f"GGUF{'' if scheme is None else f' as {scheme}'}"
    floats = FLOAT_BYTES[dtype]
    head: float = floats if scheme is None else _scheme(scheme, shape.hidden_size, is_head=True)
    # Untied, the embedding is looked up and stays as it is.
    embedding = head if shape.has_tied_embeddings else head + floats
    total = (
        shape.num_linear_parameters * _of_linear(facts, shape, dtype, scheme)
        + shape.num_float_parameters * floats
        + _latent_bytes(facts, shape, dtype, scheme)
        + expert_bytes(facts, shape, dtype, scheme)
        + shape.vocab_size * shape.hidden_size * embedding
        + shape.num_table_parameters * floats
    )
    # what is stored and cannot be multiplied is kept as floats (FP8)
    is_converted = stored != "mxfp4" and _of_linear(facts, shape, dtype, None) == floats
    kept = scheme or (dtype if is_converted else None)
    return int(total), " as ".join(name for name in (stored, kept) if name)


def expert_bytes(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> float:
    """Of all matrices, the experts."""
    if shape.experts is None:
        return 0.0
    stored = format_of(facts.hf_config)
    if stored == "gguf":
        return gguf_expert_bytes(GGUFFile.read(facts.path), dtype, scheme)
    if stored == "mxfp4":
        return shape.num_expert_parameters * _MXFP4.bytes_of_a_weight(shape.hidden_size)
    linear = _of_linear(facts, shape, dtype, scheme)
    if scheme is not None and linear == _scheme(scheme, shape.hidden_size):
        # two of the three matrices of an expert have hidden_size inputs, one has as many as it is wide
        linear = (2 * linear + _scheme(scheme, shape.experts.inner_size)) / 3
    return shape.num_expert_parameters * linear


def _latent_bytes(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> float:
    """What turns latent vectors. Codes of keys cannot be turned, so they become floats, which a scheme may round."""
    if shape.latent is None:
        return 0.0
    keys: float = FLOAT_BYTES[dtype]
    values = _of_linear(facts, shape, dtype, None)
    if scheme is not None:
        keys = _scheme(scheme, shape.latent.qk_nope_head_dim)
        values = min(values, _scheme(scheme, shape.latent.kv_lora_rank))
    return shape.num_key_parameters * keys + shape.num_value_parameters * values


def _of_linear(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> float:
    """Bytes a weight of a linear layer."""
    declared = declared_quantization(facts.hf_config)
    linear: float = FLOAT_BYTES[dtype] if declared is None else _stored(declared, shape, FLOAT_BYTES[dtype])
    return linear if scheme is None else min(linear, _scheme(scheme, shape.hidden_size))


def looked_up_bytes(facts: ModelFacts, shape: ModelShape, dtype: str) -> int:
    """Of all matrices, those of which a step reads a few rows: an embedding that is not the head, and tables."""
    tables = shape.num_table_parameters * FLOAT_BYTES[dtype]
    if shape.has_tied_embeddings:
        return tables
    if format_of(facts.hf_config) == "gguf":
        return int(tables + gguf_embedding_bytes(GGUFFile.read(facts.path), dtype))
    return int(tables + shape.vocab_size * shape.hidden_size * FLOAT_BYTES[dtype])


def _scheme(name: str, num_inputs: int, *, is_head: bool = False) -> float:
    return scheme_form(name, num_inputs, is_head=is_head).bytes_of_a_weight(num_inputs)


def _float4(group: Any, shape: ModelShape, floats: float) -> float:
    if group == 32:
        return _MXFP4.bytes_of_a_weight(shape.hidden_size)
    return min(floats, _NVFP4.bytes_of_a_weight(shape.hidden_size)) if floats < FLOAT_BYTES["float32"] else floats


def _stored(declared: dict[str, Any], shape: ModelShape, floats: float) -> float:
    """Bytes a weight of a linear layer in a checkpoint that comes quantised; what must be computed becomes floats."""
    if declared.get("quant_method") in ("gptq", "awq"):
        is_computed = bool(declared.get("desc_act"))
        bits = declared.get("bits", declared.get("w_bit", 4))
        group = declared.get("group_size", 128)
        is_symmetric = bool(declared.get("sym", False))
    elif declared.get("quant_method") == "mxfp4":
        return floats  # experts alone are quantised
    elif declared.get("quant_method") == "modelopt":
        is_float4 = declared.get("quant_algo") == "NVFP4"
        return _float4(16, shape, floats) if is_float4 else floats
    else:
        groups = declared.get("config_groups") or {"": {"weights": {"type": "float"}}}
        weights = next(iter(groups.values())).get("weights") or {}
        if weights.get("type") == "float" and weights.get("num_bits") == 4:
            return _float4(weights.get("group_size"), shape, floats)
        is_computed = weights.get("type") == "float" or bool(weights.get("actorder") == "group")
        bits = weights.get("num_bits", 8)
        group = weights.get("group_size")
        is_symmetric = bool(weights.get("symmetric", True))
    if is_computed or bits not in (4, 8):
        return floats
    size = group if isinstance(group, int) and group > 0 else shape.hidden_size
    size = min(size, 128) if bits == 4 else size
    return Form(bits, size, 0 if is_symmetric else None).bytes_of_a_weight(shape.hidden_size)
