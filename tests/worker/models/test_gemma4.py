"""Gemma 4: what is its own beside the contract of all models (test_native_models.py)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from quire.config.mixed_shape import MixedShape
from quire.errors import ModelError
from quire.testing.model_contract import check_cuts_and_mixtures, transformers_logits
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_checkpoint, make_config, widen
from quire.worker.attention import attention_layers
from quire.worker.model_config import read_model_config
from quire.worker.model_loader import load_model
from quire.worker.models.registry import native_class

_ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def logits(path, prompt, **options):
    return ModelHarness(load_model(worker_config(path, **options))).run(0, prompt)


def changed_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_layers_that_share_keep_nothing(checkpoint):
    layers = attention_layers(load_model(worker_config(checkpoint("gemma4"))))
    kept = {name: (layer.spec.sliding_window, layer.spec.bytes_per_token) for name, layer in layers.items()}
    assert kept == {
        "model.layers.0.self_attn.attn": (24, 128),
        "model.layers.1.self_attn.attn": (24, 128),
        "model.layers.2.self_attn.attn": (0, 256),
    }


def test_layers_that_keep_twice_as_much_are_cut_where_blocks_are_full_then(checkpoint):
    layers = attention_layers(load_model(worker_config(checkpoint("gemma4_moe"))))
    assert {layer.spec.bytes_per_token for layer in layers.values()} == {256}
    assert [layer.sliding_window for layer in layers.values()] == [24, 24, 0] * 3


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
def test_cuts_and_mixtures_change_nothing(name, checkpoint, prompt):
    path = checkpoint(name)
    check_cuts_and_mixtures(load_model(worker_config(path)), prompt, transformers_logits(path, prompt))


def test_numbers_for_a_kind_of_layer_say_the_same_as_a_list_of_layers(tmp_path, checkpoint, prompt):
    """As published, and as Transformers writes them today."""
    path = make_checkpoint(tmp_path, "gemma4_moe")
    expected = logits(path, prompt)
    config = json.loads((path / "config.json").read_text())
    assert config.pop("per_layer_config")
    (path / "config.json").write_text(json.dumps({**config, "global_head_dim": 32, "num_global_key_value_heads": 1}))
    assert torch.equal(logits(path, prompt), expected)


def test_weights_that_a_layer_which_shares_has_no_use_for_are_left_out(tmp_path, prompt):
    path = make_checkpoint(tmp_path, "gemma4")
    expected = logits(path, prompt)
    file = path / "model.safetensors"
    more = {"k_proj.weight": torch.ones(16, 64), "v_proj.weight": torch.ones(16, 64), "k_norm.weight": torch.ones(16)}
    save_file({**load_file(file), **{f"model.layers.3.self_attn.{name}": one for name, one in more.items()}}, file)
    assert torch.equal(logits(path, prompt), expected)
    # of layers with keys of their own a second one is as strange as ever
    save_file({**load_file(file), "model.layers.0.self_attn.z_proj.weight": torch.ones(1)}, file)
    with pytest.raises(ModelError, match="z_proj"):
        load_model(worker_config(path))


def test_the_published_form_runs(tmp_path, prompt):
    """What it hears with is not read; bounds of linear layers are infinite where they bound nothing."""
    text = make_config("gemma4", pad_token_id=0).to_dict()
    special = ("image", "video", "audio", "boi", "eoi", "boa")
    config = AutoConfig.for_model(
        "gemma4",
        text_config=text,
        vision_config={
            **_ENCODER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 16,
            "use_clipped_linears": True,
        },
        audio_config={**_ENCODER, "subsampling_conv_channels": [4, 4], "output_proj_dims": 16},
        eoa_token_index=307,
        **{f"{name}_token_id": 300 + number for number, name in enumerate(special)},
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    widen(model, seed=0)
    model.eval().save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits(tmp_path, prompt), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_keys_and_values_as_codes_stay_close(dtype, kv_cache_dtype, checkpoint, prompt):
    found, plain = (
        logits(checkpoint("gemma4"), prompt, dtype=dtype, kv_cache_dtype=kind) for kind in (kv_cache_dtype, None)
    )
    assert 0 < (found - plain).abs().mean() < 0.15 * plain.std()


def test_one_graph_for_the_compiler(checkpoint, prompt):
    model = load_model(worker_config(checkpoint("gemma4")))
    expected = ModelHarness(model).run(0, prompt)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(ModelHarness(model).run(0, prompt, chunk_size=20), expected, atol=1e-4, rtol=0)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, ["use_bidirectional_attention='all'", "null or 'vision'"]),
        ({"layer_types": ["chunked_attention"] * 5}, ["layer_types", "sliding_attention or full_attention"]),
        ({"num_kv_shared_layers": 4}, ["layer 2 (full_attention)", "num_kv_shared_layers"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, ["num_attention_heads=3", "2 heads of keys"]),
        ({"per_layer_config": {"1": {"num_attention_heads": 8}}}, ["layer 1 has num_attention_heads of its own"]),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, ["per_layer_config.1.head_dim=0"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["nothing for sliding_attention"]),
        ({"enable_moe_block": True, "num_experts": None}, ["num_experts=null", "whole number", "enable_moe_block"]),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": None},
            ["moe_intermediate_size=null"],
        ),
        ({"hidden_size_per_layer_input": "16"}, ["hidden_size_per_layer_input='16'", "whole number"]),
    ],
)
def test_what_is_not_built_is_refused(changes, words, tmp_path):
    path = make_checkpoint(tmp_path, "gemma4")
    changed_config(path, **changes)
    with pytest.raises(ModelError) as caught:
        load_model(worker_config(path))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("vision", "words"),
    [
        ({"head_dim": 6}, "rope_type='axial', head_dim=6: .* a multiple of 4"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        ({"hidden_activation": "sinus"}, "sinus"),
        ({"num_attention_heads": "12"}, "cannot be built from these values"),
        ({"num_hidden_layers": 1}, "the checkpoint lacks"),
    ],
)
def test_a_tower_that_cannot_be(vision, words, tmp_path):
    path = make_checkpoint(tmp_path, "gemma4")
    whole = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    changed_config(path, **whole, vision_config={"position_embedding_size": 8, **vision})
    with pytest.raises(ModelError, match=words):
        load_model(worker_config(path))


SPELLINGS = {
    "nothing": {},
    "kinds": {"layer_types": ["full_attention", "sliding_attention"] * 3, "num_hidden_layers": 6},
    "shared": {"num_hidden_layers": 12, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "one projection": {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 128},
    # counts only where one projection is both
    "two projections": {"num_global_key_value_heads": 2},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_layers_are_those_of_transformers(name, tmp_path):
    values = {"model_type": "gemma4_text", **SPELLINGS[name]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = AutoConfig.from_pretrained(tmp_path)
    own = read_model_config(tmp_path / "config.json", values, native_class("gemma4_text", []))
    assert own.rope_by_kind == theirs.rope_parameters
    assert len(own.shape.layers) == theirs.num_hidden_layers
    modes = theirs.kv_sharing_modes
    for index, layer in enumerate(own.shape.layers):
        other = theirs.per_layer_config[index]
        assert (layer.num_kv_heads, layer.head_dim) == (other.num_key_value_heads, other.head_dim)
        kind = theirs.layer_types[index]
        assert layer.window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert layer.has_one_projection == (theirs.attention_k_eq_v and not layer.window)
        assert (layer.source is not None) == (modes[index] == "reuse")
        if layer.source is not None:
            assert (modes[layer.source], theirs.layer_types[layer.source]) == ("store", kind)
        is_wide = theirs.use_double_wide_mlp and layer.source is not None
        assert layer.intermediate_size == theirs.intermediate_size * (1 + is_wide)


def test_the_last_layer_sees_every_token():
    """Transformers makes it so, whatever config.json says."""
    shape = MixedShape.of({"model_type": "gemma4_text", "num_hidden_layers": 7})
    assert [bool(layer.window) for layer in shape.layers] == [True] * 5 + [False] * 2
