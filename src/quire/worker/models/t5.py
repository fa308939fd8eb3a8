"""T5: a text is read as a whole, and another one is written that looks at it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import ModelError
from quire.messages import Media
from quire.worker.layers.relative_bias import bias_by_distance
from quire.worker.model_config import Nullable
from quire.worker.models.causal_lm import head_of
from quire.worker.models.checkpoint_map import MERGED, QKV, CheckpointMap
from quire.worker.models.encoder_decoder import EncoderDecoder
from quire.worker.models.t5_layers import GATED, Decoder, Encoder

_LAYER = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d+)\.(\w+)\.(?:(\w+)\.)?weight")
_NORMS = {"encoder": ("self_attn_norm", "mlp_norm"), "decoder": ("self_attn_norm", "cross_attn_norm", "mlp_norm")}
_PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_CROSS = {"q": "query", "k": "key", "v": "value", "o": "o_proj"}
_INNER = {"wi": "up_proj", "wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}


def _names(max_distance: int) -> Any:
    """What a tensor of the checkpoint is called here; of a bias, what follows from its buckets."""

    def convert(name: str, weight: Any) -> list[tuple[str, Any]]:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return [(name, weight)]
        stack, index, place, module, inner = layer.groups()
        is_causal = stack == "decoder"
        path = f"{'model' if is_causal else stack}.layers.{index}"
        if module == "layer_norm":
            return [(f"{path}.{_NORMS[stack][int(place)]}.weight", weight)]
        if inner == "relative_attention_bias":
            # who asks for names alone has no rows
            bias = bias_by_distance(weight, max_distance, is_causal=is_causal) if weight.shape[0] else weight
            return [(f"{path}.self_attn.bias", bias)]
        if module == "SelfAttention":
            return [(f"{path}.self_attn.{_PROJECTIONS[inner]}.weight", weight)]
        if module == "EncDecAttention":
            return [(f"{path}.cross_attn.{_CROSS[inner]}.weight", weight)]
        return [(f"{path}.mlp.{_INNER[inner]}.weight", weight)]

    return convert


class T5ForConditionalGeneration(EncoderDecoder):
    architectures: tuple[str, ...] = ("T5ForConditionalGeneration",)
    config_names = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    config_defaults: dict[str, Any] = {
        "vocab_size": 32_128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": Nullable(None),
        "num_heads": 8,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
    }
    # layers of a stack have the bias of the first one
    shares_bias = True
    # hidden states may be scaled before the head
    has_scale = True

    @staticmethod
    def complete_config(config: Any) -> None:
        if config.num_decoder_layers is None:
            config.num_decoder_layers = config.num_layers
        if getattr(config, "scale_decoder_outputs", None) is None:
            # a head with weights of its own takes hidden states as they come
            config.scale_decoder_outputs = config.tie_word_embeddings

    def __init__(self, config: Any, max_model_len: int) -> None:
        if torch.get_default_dtype() == torch.float16:
            raise ModelError("dtype=float16: hidden states of T5 grow beyond its range. Take bfloat16 or float32.")
        is_scaled = self.has_scale and config.scale_decoder_outputs
        scale = config.d_model**-0.5 if is_scaled else 1.0
        model = Decoder(config, scale=scale, shares_bias=self.shares_bias)
        super().__init__(model, head_of(config, model.embed_tokens))
        self.encoder = Encoder(config, config.num_layers, "encoder", is_causal=False, shares_bias=self.shares_bias)
        self.vocab_size: int = config.vocab_size
        self.max_source = max_model_len - 1
        self.checkpoint_map = CheckpointMap(
            merged=MERGED if config.feed_forward_proj.startswith(GATED) else QKV,
            prefixes={
                **dict.fromkeys(("shared.", "encoder.embed_tokens.", "decoder.embed_tokens."), "model.embed_tokens."),
                "decoder.final_layer_norm.": "model.final_layer_norm.",
            },
            repeated=("model.embed_tokens.weight",),
            # a bias that no layer of cross attention uses
            ignored=("EncDecAttention.relative_attention_bias.weight",),
            convert=_names(config.relative_attention_max_distance),
            converts_quantized=True,
        )

    def source_of(self, media: Media) -> Tensor:
        if list(media.shape) != [media.length] or len(media.pixels) != 4 * media.length:
            raise ModelError(f"media: a source of {media.length} tokens needs as many ids, not {media.shape}.")
        ids = np.frombuffer(media.pixels, dtype=np.int32)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ModelError(f"media: token ids of a source must be from 0 to {self.vocab_size - 1}.")
        return torch.from_numpy(ids.astype(np.int64))

    def largest_source(self) -> Tensor:
        return torch.zeros(self.max_source, dtype=torch.int64)

    def encode(self, source: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(self.model.embed_tokens(source))
        return encoded


MODEL = T5ForConditionalGeneration
