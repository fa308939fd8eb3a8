"""Falcon Mamba: Mamba with norms of what steers its states."""

from __future__ import annotations

from typing import Any

from quire.worker.layers import PlainNorm
from quire.worker.models.causal_lm import CausalLM, head_of
from quire.worker.models.mamba import DEFAULTS, MambaForCausalLM, MambaMixer, complete_config, make_mixer
from quire.worker.models.mamba2 import model_of


def make_normed_mixer(config: Any, name: str) -> MambaMixer:
    mixer = make_mixer(config, name)
    rank, state_size, _ = mixer.parts
    mixer.dt_layernorm = PlainNorm(rank, config.mixer_rms_eps)
    mixer.b_layernorm = PlainNorm(state_size, config.mixer_rms_eps)
    mixer.c_layernorm = PlainNorm(state_size, config.mixer_rms_eps)
    return mixer


class FalconMambaForCausalLM(CausalLM):
    architectures = ("FalconMambaForCausalLM",)
    checkpoint_map = MambaForCausalLM.checkpoint_map
    config_defaults = {**DEFAULTS, "mixer_rms_eps": 1e-6}
    complete_config = staticmethod(complete_config)

    def __init__(self, config: Any, max_model_len: int) -> None:
        model = model_of(config, make_normed_mixer)
        super().__init__(model, head_of(config, model.embeddings))


MODEL = FalconMambaForCausalLM
