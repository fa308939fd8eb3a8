"""The figures that the thesis states, out of our formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.arithmetic import Machine, ModelShape
from quire.errors import ModelError
from quire.interfaces.cli.program import main

OPT_13B = {
    "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480, "vocab_size": 50272,
}  # fmt: skip
H100 = Machine(flops=1e15, bytes_per_second=3.35e12)


def test_opt_13b_keeps_800_kilobytes_a_token() -> None:
    shape = ModelShape.of(OPT_13B)
    assert shape.kv_bytes_per_token("float16") == 819_200  # 3.3
    assert 2_048 * shape.kv_bytes_per_token("float16") == pytest.approx(1.6e9, rel=0.06)
    assert shape.weight_bytes("float16") == pytest.approx(26e9, rel=0.03)  # table 3.1


def test_a_hundred_layers_of_eight_heads_keep_400_kilobytes() -> None:
    shape = ModelShape.of(
        {"hidden_size": 8192, "num_hidden_layers": 100, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256}
    )  # fmt: skip
    assert shape.kv_bytes_per_token("bfloat16") == 409_600
    # codes of one byte, and four bytes for each token and head
    assert shape.kv_bytes_per_token("int8") == shape.kv_bytes_per_token("fp8") == 204_800 + 2 * 100 * 8 * 4
    cache = 100_000 * shape.kv_bytes_per_token("bfloat16")
    assert cache == pytest.approx(40e9, rel=0.03)
    assert H100.kv_read_seconds(cache) == pytest.approx(12e-3, rel=0.03)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


def test_latent_attention_keeps_576_values_a_token_and_layer() -> None:
    shape = ModelShape.of(DEEPSEEK_V3)
    assert shape.kv_bytes_per_token("bfloat16") == 61 * 576 * 2
    assert shape.kv_bytes_per_token("int8") == 61 * (576 + 4)
    all_heads = 128 * (192 + 128)
    assert all_heads / 576 == pytest.approx(71, rel=0.01)
    attention = 1536 * (7168 + 128 * 192) + 7168 * 576 + 128 * 128 * 7168
    assert shape.num_key_parameters == shape.num_value_parameters == 61 * 512 * 128 * 128
    assert shape.num_linear_parameters == 61 * (attention + 3 * 7168 * 18432)
    assert ModelShape.of({**DEEPSEEK_V3, "q_lora_rank": None}).num_linear_parameters == 61 * (
        attention - 1536 * (7168 + 128 * 192) + 7168 * 128 * 192 + 3 * 7168 * 18432
    )


# as it was published, without layer_types
LLAMA_4_MAVERICK = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
    "no_rope_layers": [], "vocab_size": 202048,
}  # fmt: skip


def test_llama_4_has_experts_in_every_second_layer_and_chunks_in_three_of_four() -> None:
    shape = ModelShape.of(LLAMA_4_MAVERICK)
    assert shape.num_parameters == pytest.approx(400e9, rel=0.01)
    assert shape.num_active_parameters == pytest.approx(17e9, rel=0.02)
    a_layer = shape.kv_bytes_per_token("bfloat16") // 48
    assert shape.kv_bytes(131_072, "bfloat16") == a_layer * (12 * 131_072 + 36 * 8192)
    listed = {"no_rope_layers": [1, 0] * 24}
    assert ModelShape.of({**LLAMA_4_MAVERICK, **listed}).num_windowed_layers == 24
    typed = {"layer_types": ["chunked_attention"] * 47 + ["full_attention"], "moe_layers": [3]}
    shape = ModelShape.of({**LLAMA_4_MAVERICK, **typed})
    assert (shape.num_windowed_layers, shape.window) == (47, 8192)
    assert shape.experts is not None
    assert shape.experts.num_layers == 1


HUNYUAN_3 = {
    "model_type": "hy_v3", "hidden_size": 4096, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 13312, "moe_intermediate_size": 1536,
    "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "vocab_size": 120832,
    "mlp_layer_types": ["dense", *["sparse"] * 79],
}  # fmt: skip


def test_layers_with_experts_may_be_named_one_by_one() -> None:
    shape = ModelShape.of(HUNYUAN_3)
    assert shape.num_parameters == pytest.approx(295e9, rel=0.01)
    assert shape.num_active_parameters == pytest.approx(21e9, rel=0.02)
    assert shape.experts is not None
    assert (shape.experts.num_layers, shape.experts.shared_size) == (79, 1536)


ERNIE_4_5 = {
    "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_num_experts": 64,
    "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27,
    "moe_layer_interval": 1, "tie_word_embeddings": True, "vocab_size": 103424,
}  # fmt: skip


def test_ernie_has_experts_from_one_layer_to_another() -> None:
    shape = ModelShape.of(ERNIE_4_5)
    assert shape.num_parameters == pytest.approx(21.8e9, rel=0.01)
    assert shape.num_active_parameters == pytest.approx(3.3e9, rel=0.05)
    for changes, num_layers in (
        ({"moe_layer_end_index": -1}, 27),
        ({"moe_layer_end_index": 9, "moe_layer_start_index": 4}, 6),
        ({"moe_layer_interval": 2}, 14),
    ):
        experts = ModelShape.of({**ERNIE_4_5, **changes}).experts
        assert experts is not None
        assert experts.num_layers == num_layers


def test_the_roofline_of_an_h100() -> None:
    assert H100.ridge == pytest.approx(300, rel=0.01)
    assert H100.compute_bound_batch(bytes_per_weight=2) == pytest.approx(300, rel=0.01)
    assert H100.weight_floor_seconds(16_000_000_000) == pytest.approx(5e-3, rel=0.05)


def test_a_plan_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**OPT_13B, "model_type": "opt", "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--memory", "40GiB", "--bandwidth", "1555", "--tflops", "312"]) == 0
    text = capsys.readouterr().out
    assert "819,200 bytes a token" in text
    assert "ms to read the weights" in text
    assert main(["plan", str(tmp_path), "--memory", "40GiB", "--kv-cache-dtype", "fp8"]) == 0
    assert "422,400 bytes a token as fp8" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--memory", "20GB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_config_without_sizes_is_a_clear_error() -> None:
    with pytest.raises(ModelError, match="none of hidden_size, n_embd, d_model is there"):
        ModelShape.of({"vocab_size": 10})


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"text_config": {"moe_num_experts": [64, 64]}}, "moe_num_experts=[64, 64]: must be a whole number"),
        (
            {"num_local_experts": 8, "intermediate_size": 9},
            "none of num_experts_per_tok, experts_per_token, top_k_experts, moe_k is there",
        ),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: the model's attention keeps latent vectors"),
        ({"attention_value_scale": 0.7}, "attention_value_scale=0.7: layers with a window keep more heads"),
        ({"mamba_d_state": 16}, "mamba_d_state=16: the model has layers that keep a state"),
        ({"conv_L_cache": 3}, "conv_L_cache=3: the model has layers that keep a state"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads=32: the model has layers that keep a state"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=linear_attention: the model has layers"),
        ({"layers_block_type": ["mamba", "attention"]}, "layer_types=mamba: the model has layers without"),
    ],
)
def test_a_plan_is_refused_where_its_formulas_are_others(values, what, tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**OPT_13B, "model_type": "opt", **values}))
    assert main(["plan", str(tmp_path), "--memory", "40GiB"]) == 2
    told = capsys.readouterr()
    assert what in told.err
    assert "tokens" not in told.out


def test_no_experts_are_no_reason() -> None:
    assert ModelShape.of({**OPT_13B, "num_local_experts": 0, "kv_lora_rank": None}) == ModelShape.of(OPT_13B)


def test_kinds_of_attention_are_no_reason() -> None:
    kinds = ["full_attention", "sliding_attention", "chunked_attention", "attention"] * 10
    assert ModelShape.of({**OPT_13B, "layer_types": kinds}) == ModelShape.of(OPT_13B)


@pytest.mark.parametrize(
    ("flags", "form"), [([], "22.0 MiB in fp8 as bfloat16"), (["--quantization", "int8"], "MiB in fp8 as int8")]
)
def test_a_plan_says_what_fp8_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags, form) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--memory", "40GiB", *flags]) == 0
    assert form in capsys.readouterr().out


def test_shared_experts_under_two_names_count_once():
    names = ("n_shared_experts", "num_shared_experts")
    config = {
        "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 3072,
        "vocab_size": 1000, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    }  # fmt: skip
    once, twice = (ModelShape.of({**config, **dict.fromkeys(given, 2)}) for given in (names[:1], names))
    assert once.num_linear_parameters == twice.num_linear_parameters
    assert once.num_linear_parameters - ModelShape.of(config).num_linear_parameters == 4 * 3 * 1024 * 2 * 512
