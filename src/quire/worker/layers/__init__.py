"""Layers that models are written with."""

from quire.worker.layers.activation import ClampedSwiGLU, GatedActivation, activation
from quire.worker.layers.embedding import Embedding, LMHead, VocabEmbedding
from quire.worker.layers.experts import Experts, Routing
from quire.worker.layers.latent import LatentProjection, latent_parts
from quire.worker.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quire.worker.layers.norm import GatedRMSNorm, LayerNorm, RMSNorm
from quire.worker.layers.parameter import load_weight, make_parameter
from quire.worker.layers.ranks import tensor_parallel
from quire.worker.layers.recurrent import CausalConv, GatedDeltaRule, StateSpaceScan
from quire.worker.layers.rotary import RotaryEmbedding
from quire.worker.layers.tensor_parallel import TensorParallelGroup

__all__ = [
    "CausalConv",
    "ClampedSwiGLU",
    "ColumnParallelLinear",
    "Embedding",
    "Experts",
    "GatedActivation",
    "GatedDeltaRule",
    "GatedRMSNorm",
    "LMHead",
    "LatentProjection",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Routing",
    "RowParallelLinear",
    "StateSpaceScan",
    "TensorParallelGroup",
    "VocabEmbedding",
    "activation",
    "latent_parts",
    "load_weight",
    "make_parameter",
    "tensor_parallel",
]
