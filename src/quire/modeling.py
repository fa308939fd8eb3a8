"""What the author of a model imports (docs/adding-a-model.md), and who trains one (docs/training.md). Nothing here is
needed to use Quire."""

from quire.worker.attention import Attention, AttentionBackend, AttentionBatch, AttentionSpec
from quire.worker.layers import (
    CausalConv,
    ClampedSwiGLU,
    ColumnParallelLinear,
    Embedding,
    Experts,
    GatedActivation,
    GatedDeltaRule,
    GatedRMSNorm,
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
    StateSpaceScan,
    VocabEmbedding,
    activation,
    latent_parts,
    load_weight,
    make_parameter,
)
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.state_cache import RecurrentLayer, StateTensor, TokenSpans
from quire.worker.training.adapter import LoRA
from quire.worker.training.trained_model import TrainedModel, load_for_training

__all__ = [
    "MERGED",
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "CausalConv",
    "CausalLM",
    "CheckpointMap",
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
    "LoRA",
    "MergedColumnParallelLinear",
    "Nullable",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Routing",
    "RowParallelLinear",
    "StateSpaceScan",
    "StateTensor",
    "TokenSpans",
    "TrainedModel",
    "VocabEmbedding",
    "activation",
    "head_of",
    "latent_parts",
    "load_for_training",
    "load_weight",
    "make_parameter",
]
