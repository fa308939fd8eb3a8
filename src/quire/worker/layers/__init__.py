"""Layers that models are written with."""

from quire.worker.layers.activation import ClampedSwiGLU, GatedActivation, activation
from quire.worker.layers.alibi import alibi_slopes
from quire.worker.layers.embedding import Embedding, LMHead, VocabEmbedding
from quire.worker.layers.experts import Experts, Routing
from quire.worker.layers.feed_forward import GatedMLP, PlainMLP
from quire.worker.layers.latent import LatentProjection, latent_parts
from quire.worker.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quire.worker.layers.norm import GatedRMSNorm, LayerNorm, PlainNorm, ProjectionNorm, RMSNorm
from quire.worker.layers.parameter import load_weight, make_parameter
from quire.worker.layers.ranks import tensor_parallel
from quire.worker.layers.recurrent import CausalConv, GatedDeltaRule, LinearAttention, StateSpaceScan
from quire.worker.layers.rotary import NoPositions, RotaryEmbedding
from quire.worker.layers.selective_scan import SelectiveScan
from quire.worker.layers.temperature import QueryTemperature
from quire.worker.layers.tensor_parallel import TensorParallelGroup

__all__ = [
    "CausalConv",
    "ClampedSwiGLU",
    "ColumnParallelLinear",
    "Embedding",
    "Experts",
    "GatedActivation",
    "GatedDeltaRule",
    "GatedMLP",
    "GatedRMSNorm",
    "LMHead",
    "LatentProjection",
    "LayerNorm",
    "LinearAttention",
    "MergedColumnParallelLinear",
    "NoPositions",
    "PlainMLP",
    "PlainNorm",
    "ProjectionNorm",
    "QKVParallelLinear",
    "QueryTemperature",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Routing",
    "RowParallelLinear",
    "SelectiveScan",
    "StateSpaceScan",
    "TensorParallelGroup",
    "VocabEmbedding",
    "activation",
    "alibi_slopes",
    "latent_parts",
    "load_weight",
    "make_parameter",
    "tensor_parallel",
]
