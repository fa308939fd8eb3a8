"""Attention behind one interface: the layer that models use, the backends that compute it."""

from quire.worker.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec
from quire.worker.attention.heads import Heads
from quire.worker.attention.layer import Attention, attention_layers, encoding_layers
from quire.worker.attention.registry import bind_backend

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "Heads",
    "attention_layers",
    "bind_backend",
    "encoding_layers",
]
