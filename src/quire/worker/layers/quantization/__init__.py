"""Weights as codes and scales: what a quantised weight is, and the schemes that make one at load."""

from quire.worker.layers.quantization.by_rows import by_rows
from quire.worker.layers.quantization.quantized_weight import GroupBorderError, QuantizedWeight, concatenate
from quire.worker.layers.quantization.scheme import Role, Scheme, apply, find_scheme, keeps_codes

__all__ = [
    "GroupBorderError",
    "QuantizedWeight",
    "Role",
    "Scheme",
    "apply",
    "by_rows",
    "concatenate",
    "find_scheme",
    "keeps_codes",
]
