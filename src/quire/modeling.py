"""What the author of a model imports; docs/adding-a-model.md shows how. Nothing here is needed to use Quire."""

from quire.worker.attention import Attention, AttentionBackend, AttentionBatch, AttentionSpec
from quire.worker.layers import (
    ClampedSwiGLU,
    ColumnParallelLinear,
    Experts,
    GatedActivation,
    LatentProjection,
    LayerNorm,
    LMHead,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    Routing,
    RowParallelLinear,
    VocabEmbedding,
    activation,
    load_weight,
    make_parameter,
)
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap

__all__ = [
    "MERGED",
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "CausalLM",
    "CheckpointMap",
    "ClampedSwiGLU",
    "ColumnParallelLinear",
    "Experts",
    "GatedActivation",
    "LMHead",
    "LatentProjection",
    "LayerNorm",
    "MergedColumnParallelLinear",
    "Nullable",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Routing",
    "RowParallelLinear",
    "VocabEmbedding",
    "activation",
    "head_of",
    "load_weight",
    "make_parameter",
]
