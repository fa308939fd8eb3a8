"""GPT-2: learned positions, layer norms, and weights that are stored the other way round."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.errors import ModelError
from quire.worker.layers import Embedding, PlainMLP
from quire.worker.layers.plain_attention import PlainAttention
from quire.worker.models.bloom import make_norm
from quire.worker.models.checkpoint_map import QKV, CheckpointMap
from quire.worker.models.llama import LlamaLike, LlamaModel, Parts


def make_attention(config: Any, index: int, name: str, rotary: Any) -> PlainAttention:
    size, num_heads = config.hidden_size, config.num_attention_heads
    scale = (size // num_heads) ** -0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= index + 1
    return PlainAttention(size, num_heads, num_heads, name=name, scale=scale)


def make_mlp(config: Any, index: int) -> PlainMLP:
    size = config.hidden_size
    return PlainMLP(size, config.n_inner or 4 * size, config.activation_function, bias=True)


class GPT2Model(LlamaModel):
    def __init__(self, config: Any, *arguments: Any, **further: Any) -> None:
        super().__init__(config, *arguments, **further)
        self.embed_positions = Embedding(config.max_position_embeddings, config.hidden_size)

    def enter(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return embedded + self.embed_positions(positions)


def as_linear(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """GPT-2 stores [in, out] where a linear layer has [out, in], and query, key and value in one."""
    if not name.endswith((".c_attn.weight", ".c_attn.bias", ".c_proj.weight", ".c_proj.bias", ".up_proj.weight")):
        return [(name, tensor)]
    if name.endswith("weight") and tensor.ndim == 2:
        tensor = tensor.t()
    name = name.replace("self_attn.c_proj", "self_attn.o_proj").replace("mlp.c_proj", "mlp.down_proj")
    if ".c_attn." not in name or tensor.shape[0] % 3:
        return [(name, tensor)]
    return [(name.replace("c_attn", part), piece) for part, piece in zip(QKV, tensor.chunk(3), strict=True)]


class GPT2LMHeadModel(LlamaLike):
    architectures = ("GPT2LMHeadModel",)
    parts = Parts(make_attention, make_mlp, make_norm, model=GPT2Model, rotary=None)
    checkpoint_map = CheckpointMap(
        merged=QKV,
        modules={
            "wte": "embed_tokens",
            "wpe": "embed_positions",
            "h": "layers",
            "ln_1": "input_layernorm",
            "attn": "self_attn",
            "ln_2": "post_attention_layernorm",
            "c_fc": "up_proj",
            "ln_f": "norm",
        },
        # the original files hold the backbone alone, without a prefix
        prefixes={"transformer.": "model."} | {f"{part}.": f"model.{part}." for part in ("wte", "wpe", "h", "ln_f")},
        ignored=(".attn.bias", ".attn.masked_bias"),
        convert=as_linear,
    )
    config_names = {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    }
    config_defaults = {
        "vocab_size": 50_257,
        "max_position_embeddings": 1024,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Any, max_model_len: int) -> None:
        if config.add_cross_attention:
            raise ModelError("config.json: add_cross_attention=True means an encoder, which Quire does not have.")
        super().__init__(config, max_model_len)


MODEL = GPT2LMHeadModel
