"""ERNIE 4.5 with experts: Llama whose positions turn neighbours, and experts chosen with a learned correction beside
shared ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from quire.errors import ModelError
from quire.worker.layers import Experts, Routing
from quire.worker.layers.stored_weight import read
from quire.worker.model_config import Nullable
from quire.worker.models.checkpoint_map import MERGED, CheckpointMap
from quire.worker.models.llama import LlamaLike, LlamaMLP, Parts, complete_kv_heads, make_attention
from quire.worker.models.multi_token import MultiToken

# Weights of experts are divided by their sum, or by this where it is less: a softmax that leaves its k greatest so
# little does not occur.
_LEAST_SUMS = (1e-12, None)


def make_mlp(config: Any, index: int) -> nn.Module:
    is_in_turn = (index + 1) % config.moe_layer_interval == 0
    if not is_in_turn or not config.moe_layer_start_index <= index <= config.moe_layer_end_index:
        return LlamaMLP(config, bias=False)
    inner_size = config.moe_intermediate_size
    num_shared = config.moe_num_shared_experts
    return Experts(
        config.hidden_size,
        inner_size,
        config.num_experts,
        Routing(config.num_experts_per_tok),
        config.hidden_act,
        has_correction=True,
        shared=LlamaMLP(config, bias=False, inner_size=inner_size * num_shared) if num_shared else None,
    )


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.moe_layer_end_index in (None, -1):
        config.moe_layer_end_index = config.num_hidden_layers - 1
    for key, allowed in (("use_bias", (False, None)), ("moe_norm_min", _LEAST_SUMS)):
        found = getattr(config, key, allowed[0])
        if found not in allowed:
            raise ModelError(f"config.json: {key}={found!r}: only {allowed[0]} is built. Try model_impl=transformers.")


def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
    """The correction is a line of one group."""
    if not name.endswith(".e_score_correction_bias"):
        return [(name, weight)]
    line: Any = read(weight)
    return [(name, line.flatten())]


class Ernie4_5_MoeForCausalLM(LlamaLike):  # noqa: N801 (as in config.json)
    architectures = ("Ernie4_5_MoeForCausalLM",)
    parts = Parts(make_attention, make_mlp, is_interleaved=True)
    # its layer has no experts
    multi_token = MultiToken(
        make_attention,
        lambda config, index: LlamaMLP(config, bias=False),
        prefix=lambda config: "model.mtp_",
        parts={
            "emb_norm.0.": "embedding_norm.",
            "hidden_norm.0.": "hidden_norm.",
            "linear_proj.0.": "fc.",
            "block.0.": "layers.0.",
        },
        feeds_normed=True,
        shares_norm=True,
        is_interleaved=lambda config: True,
    )
    checkpoint_map = CheckpointMap(
        merged=MERGED,
        modules={"moe_statics": "gate", "shared_experts": "shared_expert"},
        # what only drafts
        ignored_modules=("model.mtp_",),
        convert=convert,
        converts_quantized=True,
    )
    config_names = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
    config_defaults = {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": Nullable(4),
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": None,
        "moe_layer_interval": 1,
        "tie_word_embeddings": True,
    }
    complete_config = staticmethod(complete_config)


MODEL = Ernie4_5_MoeForCausalLM
