"""Weights as codes and scales: what a quantised weight is, and the schemes that make one at load."""

from quire.worker.layers.quantization.quantized_weight import GroupBorderError, QuantizedWeight, concatenate
from quire.worker.layers.quantization.scheme import Role, Scheme, apply, find_scheme

__all__ = ["GroupBorderError", "QuantizedWeight", "Role", "Scheme", "apply", "concatenate", "find_scheme"]
