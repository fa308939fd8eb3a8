"""What the weights of a model weigh once they are loaded, quantised or not: for `quire plan`, before anything is read.

Pure functions of config.json (or a GGUF file's head) and of an option. A packed weight of 8 bits with one scale an
output has that scale in float32; groups have scales, and offsets where they are needed, in float16.
"""

from __future__ import annotations

from typing import Any

from quire.config.arithmetic import FLOAT_BYTES, ModelShape
from quire.config.gguf_file import GGUFFile, GGUFTensor
from quire.config.model_facts import ModelFacts
from quire.config.quantization import SCHEMES, declared_quantization, format_of
from quire.errors import OptionError

_SCALE = 2
_INT4_GROUP = _MXFP4_GROUP = 32
# bits, group and offsets of what the types of GGUF become; types that are not here become floats
_GGUF = {
    "Q4_0": (4, 32, False), "Q4_1": (4, 32, True), "Q4_K": (4, 32, True), "Q5_0": (8, 32, False), "Q5_1": (8, 32, True),
    "Q5_K": (8, 32, True), "Q8_0": (8, 32, False), "Q6_K": (8, 16, False), "Q3_K": (8, 16, False),
    "Q2_K": (8, 16, True), "IQ4_NL": (8, 32, False), "IQ4_XS": (8, 32, False), "MXFP4": (4, 32, False),
}  # fmt: skip


def weight_bytes(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> tuple[int, str]:
    """Bytes of all matrices, and in which form they are."""
    if scheme is not None and scheme not in SCHEMES:
        raise OptionError(f"quantization={scheme}: what its weights weigh is known for {', '.join(SCHEMES)} alone.")
    stored = format_of(facts.hf_config)
    if scheme is None and stored is None:
        return shape.weight_bytes(dtype), dtype
    if stored == "gguf":
        return _of_gguf(GGUFFile.read(facts.path), dtype, scheme), f"GGUF{'' if scheme is None else f' as {scheme}'}"
    floats = FLOAT_BYTES[dtype]
    head: float = floats if scheme is None else _scheme(scheme, shape.hidden_size, "head")
    # Untied, the embedding is looked up and stays as it is.
    embedding = head if shape.has_tied_embeddings else head + floats
    total = (
        shape.num_linear_parameters * _of_linear(facts, shape, dtype, scheme)
        + shape.num_float_parameters * floats
        + expert_bytes(facts, shape, dtype, scheme)
        + shape.vocab_size * shape.hidden_size * embedding
        + shape.num_table_parameters * floats
    )
    return int(total), " as ".join(name for name in (stored, scheme) if name)


def expert_bytes(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> float:
    """Of all matrices, the experts."""
    if shape.experts is None:
        return 0.0
    if format_of(facts.hf_config) == "mxfp4":
        return shape.num_expert_parameters * _packed(4, _MXFP4_GROUP, has_offsets=False)
    linear = _of_linear(facts, shape, dtype, scheme)
    if scheme is not None and linear == _scheme(scheme, shape.hidden_size, "linear"):
        # two of the three matrices of an expert have hidden_size inputs, one has as many as it is wide
        linear = (2 * linear + _scheme(scheme, shape.experts.inner_size, "linear")) / 3
    return shape.num_expert_parameters * linear


def _of_linear(facts: ModelFacts, shape: ModelShape, dtype: str, scheme: str | None) -> float:
    """Bytes a weight of a linear layer."""
    declared = declared_quantization(facts.hf_config)
    linear: float = FLOAT_BYTES[dtype] if declared is None else _stored(declared, shape, FLOAT_BYTES[dtype])
    return linear if scheme is None else min(linear, _scheme(scheme, shape.hidden_size, "linear"))


def looked_up_bytes(facts: ModelFacts, shape: ModelShape, dtype: str) -> int:
    """Of all matrices, those of which a step reads a few rows: an embedding that is not the head, and tables."""
    tables = shape.num_table_parameters * FLOAT_BYTES[dtype]
    if shape.has_tied_embeddings:
        return tables
    if format_of(facts.hf_config) == "gguf":
        embedding = GGUFFile.read(facts.path).tensors["token_embd.weight"]
        return int(embedding.num_elements * _as_kept(embedding, dtype))
    return tables + shape.vocab_size * shape.hidden_size * FLOAT_BYTES[dtype]


def _as_kept(tensor: GGUFTensor, dtype: str) -> float:
    """Bytes a weight of a tensor of a GGUF file."""
    found = _GGUF.get(tensor.type_name)
    return float(FLOAT_BYTES[dtype]) if found is None else _packed(found[0], found[1], has_offsets=found[2])


def _packed(bits: int, group: int, *, has_offsets: bool) -> float:
    return bits / 8 + _SCALE * (2 if has_offsets else 1) / group


def _scheme(name: str, num_inputs: int, role: str) -> float:
    is_int4 = name.startswith("int4") and role != "head"
    return _packed(4, _INT4_GROUP, has_offsets=False) if is_int4 else 1 + 2 * _SCALE / num_inputs


def _stored(declared: dict[str, Any], shape: ModelShape, floats: float) -> float:
    """Bytes a weight of a linear layer in a checkpoint that comes quantised; what must be computed becomes floats."""
    if declared.get("quant_method") in ("gptq", "awq"):
        is_computed = bool(declared.get("desc_act"))
        bits = declared.get("bits", declared.get("w_bit", 4))
        group = declared.get("group_size", 128)
        is_symmetric = bool(declared.get("sym", False))
    elif declared.get("quant_method") == "mxfp4":
        return floats  # experts alone are quantised
    else:
        groups = declared.get("config_groups") or {"": {"weights": {"type": "float"}}}
        weights = next(iter(groups.values())).get("weights") or {}
        is_computed = weights.get("type") == "float" or bool(weights.get("actorder") == "group")
        bits = weights.get("num_bits", 8)
        group = weights.get("group_size")
        is_symmetric = bool(weights.get("symmetric", True))
    if is_computed or bits not in (4, 8):
        return floats
    size = group if isinstance(group, int) and group > 0 else shape.hidden_size
    return _packed(bits, min(size, 128) if bits == 4 else size, has_offsets=not is_symmetric)


def _of_gguf(file: GGUFFile, dtype: str, scheme: str | None) -> int:
    total = 0.0
    for tensor in file.tensors.values():
        if len(tensor.shape) != 2:
            continue
        found = _GGUF.get(tensor.type_name)
        name = tensor.name.removesuffix(".weight")
        size = _as_kept(tensor, dtype)
        is_looked_up = name == "token_embd" and "output.weight" in file.tensors
        if scheme is not None and not is_looked_up:
            most = 8 if name in ("output", "token_embd") or scheme.startswith("int8") else 4
            if found is None or found[0] > most:
                size = _packed(4, _INT4_GROUP, has_offsets=False) if most == 4 else 1 + 2 * _SCALE / tensor.shape[1]
        total += tensor.num_elements * size
    return int(total)
