"""Plans of models with recurrent layers: what config.json says, held against the models themselves and an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.config.arithmetic import ModelShape
from quire.engine_core.kv_cache_manager.groups import make_groups
from quire.errors import ModelError
from quire.interfaces.cli.plan import KeptState
from quire.interfaces.cli.program import main
from quire.testing.greedy import real_core
from quire.testing.tiny_checkpoints import make_checkpoint
from quire.worker.attention import attention_layers
from quire.worker.model_config import read_model_config
from quire.worker.model_loader import building
from quire.worker.models.registry import native_class
from quire.worker.state_cache import recurrent_layers

# as they were published; the sizes that matter
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "LFM2-1.2B": {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536, "max_position_embeddings": 128000,
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
        "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2, "vocab_size": 100352, "tie_word_embeddings": True,
        "layer_types": ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
        "max_position_embeddings": 131072,
    },
    "mamba2-2.7b": {
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
        "state_size": 128, "n_groups": 1, "conv_kernel": 4, "expand": 2, "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
    "qwen3_5_text": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "vocab_size": 248320,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "full_attention_interval": 4,
    },
}  # fmt: skip
# billions of parameters, active ones, bytes a token in bfloat16, MiB of states as they were computed by hand
FIGURES = {
    "Qwen3-Next-80B-A3B": (79.7, 3.87, 12 * 2 * 2 * 256 * 2, 36 * (2 + 8192 * 4 * 4 / 2**20)),
    "LFM2-1.2B": (1.17, 1.17, 6 * 2 * 8 * 64 * 2, 10 * 2048 * 3 * 4 / 2**20),
    "granite-4.0-h-tiny": (6.94, 1.47, 4 * 2 * 4 * 128 * 2, 36 * (3072 * 128 + 3328 * 4) * 4 / 2**20),
    "mamba2-2.7b": (2.70, 2.70, 0, 64 * (5120 * 128 + 5376 * 4) * 4 / 2**20),
    "qwen3_5_text": (8.95, 8.95, 8 * 2 * 4 * 256 * 2, 24 * (2 + 8192 * 4 * 4 / 2**20)),
}


def built(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model without memory."""
    model_class = native_class(config["model_type"], [])
    values = read_model_config(Path("config.json"), config, model_class)
    with building(dtype, torch.device("meta")):
        model: nn.Module = model_class(values, 4096)
    return model


# 512 experts in each of 48 layers take seconds to make
WITH_FEWER_EXPERTS = {**PUBLISHED, "Qwen3-Next-80B-A3B": {**PUBLISHED["Qwen3-Next-80B-A3B"], "num_experts": 32}}


def layers_of(model: nn.Module) -> list[Any]:
    layers = [layer.spec for layer in attention_layers(model).values()]
    return layers + [layer.spec for layer in recurrent_layers(model).values()]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_these_figures(name: str) -> None:
    shape = ModelShape.of(PUBLISHED[name])
    billions, active, per_token, state = FIGURES[name]
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.num_active_parameters / 1e9 == pytest.approx(active, rel=0.01)
    assert shape.kv_bytes_per_token("bfloat16") == per_token
    assert shape.state_bytes / 2**20 == pytest.approx(state)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_is_what_the_model_itself_has(name: str) -> None:
    shape = ModelShape.of(WITH_FEWER_EXPERTS[name])
    model = built(WITH_FEWER_EXPERTS[name], torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_parameters == pytest.approx(num_parameters, rel=0.02)
    layers = layers_of(model)
    assert shape.kv_bytes_per_token("bfloat16") == sum(layer.bytes_per_token for layer in layers)
    groups, block_bytes = make_groups(layers, 16)
    state = KeptState.of(shape, "bfloat16")
    assert state.num_blocks == groups[-1].num_state_blocks
    assert state.num_bytes == state.num_blocks * block_bytes


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2", "granitemoehybrid", "granitemoehybrid_dense"])
def test_a_plan_is_what_an_engine_takes(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, name)
    core = real_core(path, num_gpu_blocks_override=200, max_model_len=64, max_num_seqs=4)
    config = json.loads((path / "config.json").read_text())
    manager = core.scheduler.manager
    layer_bytes = core.executor.control("statistics", {})["kv_cache_bytes"] / 200
    core.shutdown()
    shape = ModelShape.of(config)
    state = KeptState.of(shape, "float32")
    assert state.num_blocks == manager.num_state_blocks
    assert state.num_bytes == state.num_blocks * layer_bytes
    if shape.num_attention_layers:
        assert shape.kv_bytes_per_token("float32") * 16 == layer_bytes


def test_the_plan_of_a_hybrid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-Next-80B-A3B"]))
    arguments = ["plan", str(tmp_path), "--memory", "240GiB", "--context", "32768"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "79.6" in text
    assert "10 of 512 experts" in text
    assert "24,576 bytes a token as bfloat16; 0.750 GiB for 32,768 tokens" in text
    assert "a sequence in 36 layers, whatever its length" in text
    assert "checkpoints         78.8 MiB each" in text
    assert main([*arguments, "--quantization", "int4", "--kv-cache-dtype", "int8"]) == 0


def test_the_plan_of_a_model_without_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["mamba2-2.7b"]))
    assert main(["plan", str(tmp_path), "--memory", "8GiB"]) == 0
    text = capsys.readouterr().out
    assert "0 bytes a token" in text
    assert "fits                any number of tokens" in text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_size_that_is_none_is_named(name: str) -> None:
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        with pytest.raises(ModelError, match=key):
            ModelShape.of({**PUBLISHED[name], key: "many"})
