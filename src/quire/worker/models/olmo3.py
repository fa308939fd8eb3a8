"""OLMo 3: OLMo 2, of which most layers look through a window; those that see everything may turn by other angles."""

from __future__ import annotations

from typing import Any

from quire.worker.layers import RotaryEmbedding
from quire.worker.layers.rotary import parameters_by_kind
from quire.worker.model_config import Nullable
from quire.worker.models.llama import LlamaLike, Parts, PostNormDecoderLayer, complete_kv_heads
from quire.worker.models.olmo2 import Olmo2Attention, Olmo2ForCausalLM
from quire.worker.models.qwen2 import window_of_layer

_SLIDING, _FULL = "sliding_attention", "full_attention"
_THETA = 500_000.0
_PERIOD = 4


def make_attention(config: Any, index: int, name: str, rotary: RotaryEmbedding) -> Olmo2Attention:
    return Olmo2Attention(config, index, name, rotary, window_of_layer(config, index))


def complete_config(config: Any) -> None:
    complete_kv_heads(config)
    if config.layer_types is None:
        config.layer_types = [_SLIDING if (index + 1) % _PERIOD else _FULL for index in range(config.num_hidden_layers)]
    # as in Transformers, `rope_theta` beside the others is that of layers which see everything
    thetas = {_SLIDING: _THETA, _FULL: getattr(config, "rope_theta", None) or _THETA}
    config.rope_parameters = parameters_by_kind(config, thetas, _FULL)


class Olmo3ForCausalLM(LlamaLike):
    architectures = ("Olmo3ForCausalLM",)
    parts = Parts(make_attention, layer=PostNormDecoderLayer)
    config_defaults = {
        **Olmo2ForCausalLM.config_defaults,
        "sliding_window": Nullable(4096),
        "layer_types": None,
    }
    complete_config = staticmethod(complete_config)


MODEL = Olmo3ForCausalLM
