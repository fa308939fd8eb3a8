"""The option `quantization`: which names there are, what other engines call them, and how many bytes a weight takes.

Owns the check of the option against the checkpoint. The schemes themselves are in `worker/layers/quantization`, one
file each; another package brings one through an entry point (`quire.quantization`: name = scheme).
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from quire.errors import ModelError, OptionError, suggestion

ENTRY_POINT_GROUP = "quire.quantization"
SCHEMES = ("int8", "int8_weight_only", "int4", "int4_weight_only")
# Formats that are read as they come (worker/checkpoints). Naming one as the option says nothing new, and is checked.
FORMATS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "modelopt", "gguf")
# Names that other engines have for a format, or for a kernel that reads it.
_SAME_FORMAT = {
    "gptq_marlin": "gptq",
    "gptq_marlin_24": "gptq",
    "gptq_bitblas": "gptq",
    "awq_marlin": "awq",
    "compressed_tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
}
# What others call a scheme, or what comes nearest: for suggestions alone.
_NEAREST = {
    "w8a8": "int8",
    "int8_w8a8": "int8",
    "experts_int8": "int8",
    "w8a16": "int8_weight_only",
    "int8wo": "int8_weight_only",
    "fp8": "int8",
    "bitsandbytes": "int4_weight_only",
    "bnb": "int4_weight_only",
    "nf4": "int4_weight_only",
    "w4a8": "int4",
    "w4a16": "int4_weight_only",
    "int4wo": "int4_weight_only",
    "q8_0": "int8",
    "q4_0": "int4",
}


def format_of(hf_config: dict[str, Any]) -> str | None:
    """The format in which a checkpoint comes quantised, None if it does not."""
    declared = declared_quantization(hf_config)
    return None if declared is None else str(declared.get("quant_method", "unknown")).lower()


def declared_quantization(hf_config: dict[str, Any]) -> dict[str, Any] | None:
    """What config.json says about it, under the names of today and of yesterday."""
    for key in ("quantization_config", "compression_config"):
        declared = hf_config.get(key)
        if declared:
            if not isinstance(declared, dict):
                raise _wrong(key, "a JSON object")
            _check_groups(key, declared)
            return declared
    return None


def _check_groups(key: str, declared: dict[str, Any]) -> None:
    """Which layers have which format is said in objects of objects."""
    groups = declared.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise _wrong(f"{key}.config_groups", "an object of objects")
    for group in groups.values():
        if not isinstance(group.get("weights") or {}, dict):
            raise _wrong(f"{key}.config_groups: weights", "an object")
        if not isinstance(group.get("targets") or [], list):
            raise _wrong(f"{key}.config_groups: targets", "a list of names")
    if not isinstance(declared.get("sparsity_config") or {}, dict):
        raise _wrong(f"{key}.sparsity_config", "an object")


def _wrong(name: str, wanted: str) -> ModelError:
    return ModelError(f"config.json: {name} must be {wanted}. Take the config.json of the checkpoint.")


def resolve_quantization(asked: str | None, hf_config: dict[str, Any]) -> tuple[str | None, tuple[object, str]]:
    """The scheme that is applied while loading, and a reason. None: weights stay as the checkpoint has them."""
    stored = format_of(hf_config)
    if asked is None:
        return None, (None, "as stored in the checkpoint" if stored is None else f"the checkpoint comes as {stored}")
    name = asked.lower().replace("-", "_")
    if name in SCHEMES:
        return name, (name, "as asked")
    if asked in {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}:
        return asked, (asked, "as asked, from another package")
    wanted = _SAME_FORMAT.get(name, asked.lower())
    if wanted in FORMATS and wanted == stored:
        return None, (asked, "which the checkpoint is")
    raise OptionError(_refusal(asked, name, wanted, stored))


def _refusal(asked: str, name: str, wanted: str, stored: str | None) -> str:
    if wanted in FORMATS and name not in _NEAREST:
        is_here = "not quantised" if stored is None else f"quantised as {stored}"
        return (
            f"quantization={asked}: is a format of checkpoints, and this one is {is_here}. "
            f"Leave it out, or quantise at load with one of {', '.join(SCHEMES)}."
        )
    nearest = f' Did you mean "{_NEAREST[name]}"?' if name in _NEAREST else suggestion(name, SCHEMES)
    return f"quantization={asked!r}: must be one of {', '.join(SCHEMES)}.{nearest}"
