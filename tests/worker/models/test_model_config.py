"""What a native model reads from config.json is what Transformers would have told it, without Transformers.

The attributes to compare are recorded while the model is built, so a model file that reads a new one is tested for it.
"""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from quire.config.image_sizes import TOWERS
from quire.errors import ModelError
from quire.testing.model_harness import worker_config
from quire.testing.tiny_checkpoints import ARCHITECTURES, make_checkpoint, make_config, shape_0_6b_config
from quire.worker.layers import RotaryEmbedding
from quire.worker.model_config import ModelConfig, Nullable, read_model_config
from quire.worker.model_loader import load_model
from quire.worker.models.registry import find_native, native_model_types

MISSING = "is missing"
# One thing in several spellings: compared by the angles that come out.
ROPE = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
# What complete_config makes of several keys; test_gemma4.py compares it.
MADE = {"shape", "rope_by_kind", "attn_config"}
# Transformers knows kimi_k2 by the name of what it is.
# Encoders have a list of their own, with the names that config.json has; what ModernBERT makes of several keys is
# compared in tests/differential/test_encoders.py.
ENCODERS = ["bert", "roberta", "xlm-roberta"]
# Of a tower that was joined to a text model both are compared, below.
OTHERS = {
    "kimi_k2", "bert", "roberta", "xlm_roberta", "modernbert", "internvl", "llava", "llava_next", "mistral3",
}  # fmt: skip
NATIVE_TYPES = [model_type for model_type in native_model_types() if model_type not in OTHERS]
# keys without a default that a model could be built with
NEEDED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    # the tower's own default is not as wide as the text's
    "qwen2_5_vl": {
        "vision_config": {"out_hidden_size": 8192},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    # the default tower has 14 patches a side, for 16 tokens
    "gemma3": {"vision_config": {"image_size": 256}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_rms_norm": True},
    # all layers are recurrent by default, without positions: then nothing reads what attention needs
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "attention"],
        "position_embedding_type": "rope",
    },
}
TINY = [name for name, (model_type, _) in ARCHITECTURES.items() if model_type in NATIVE_TYPES]
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
GEMMA3_SPELLINGS = {
    "older": {"rope_theta": 5e5, "rope_local_base_freq": 9e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "pattern": {"sliding_window_pattern": 3},
    "newer": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}}},
    "named": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9},
}
OLMO3_SPELLINGS = {
    "older": {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2}},
    "newer": {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}}},
    "named": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9},
}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
PHI3_SPELLINGS = {
    "short": {"original_max_position_embeddings": 64, "rope_scaling": {"type": "longrope", **LONG}},
    "long": {"original_max_position_embeddings": 16, "rope_scaling": {"type": "yarn", **LONG}},
    "newer": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 5e4, "attention_factor": 1.5, **LONG}},
    "plain": {"rope_theta": 5e4, "partial_rotary_factor": 0.75, "sliding_window": 9},
}
LLAMA_LIKE = ["llama", "mistral", "qwen2", "qwen3"]
YARN = {"type": "yarn", "factor": 4.0}


# Hundreds of experts in each layer take seconds to make, and are made as a few are.
NUMBERS_OF_EXPERTS = {"num_experts", "n_routed_experts", "num_local_experts"}


class Recorder:
    """Another's attributes, with few experts, and the names of those that were read."""

    def __init__(self, config):
        self.config, self.read = config, set()

    def __getattr__(self, name):
        self.read.add(name)
        value = getattr(self.config, name)
        return min(value, 16) if name in NUMBERS_OF_EXPERTS and value else value


def ours(path):
    values = json.loads((path / "config.json").read_text())
    return read_model_config(path / "config.json", values, find_native(values["model_type"], []))


def assert_same(path):
    """Every attribute that building the model reads is what AutoConfig gives; returns their names."""
    from transformers import AutoConfig

    whole, own = AutoConfig.from_pretrained(path), ours(path)
    # of a model that sees images, what is said of its text
    theirs = whole.get_text_config()
    recorder = Recorder(own)
    model_class = find_native(whole.model_type, [])
    with torch.device("meta"):
        model_class(recorder, 64)
    of_the_whole = (
        set()
        if theirs is whole
        else {"vision_config", "tie_word_embeddings", "mm_tokens_per_image", "transformers_version"}
    )
    other_names = {name: other for other, name in getattr(model_class, "config_names", {}).items()}
    for name in sorted(recorder.read - ROPE - MADE - of_the_whole):
        expected = getattr(theirs, name, getattr(theirs, other_names.get(name, name), getattr(whole, name, MISSING)))
        assert getattr(own, name, MISSING) == expected, name
    if recorder.read & ROPE:
        assert torch.equal(angles(own), angles(theirs))
    return recorder.read


def angles(config):
    """Of all kinds of layers, if they differ by kind."""
    of_kinds = getattr(config, "rope_parameters", None) or {}
    if not any(isinstance(parameters, dict) for parameters in of_kinds.values()):
        return RotaryEmbedding.from_config(config, 64).cos_sin_cache
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = {"head_dim": head_dim, "max_position_embeddings": config.max_position_embeddings}
    configs = [SimpleNamespace(**shared, rope_parameters=of_kinds[kind]) for kind in sorted(of_kinds)]
    return torch.stack([RotaryEmbedding.from_config(one, 64).cos_sin_cache for one in configs])


def write(path, **values):
    (path / "config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("model_type", NATIVE_TYPES)
def test_what_config_json_leaves_out_has_the_default_of_transformers(model_type, tmp_path):
    read = assert_same(write(tmp_path, model_type=model_type, **NEEDED.get(model_type, {})))
    assert {"vocab_size", "tie_word_embeddings"} <= read
    # A declared default that nothing reads, or an attribute that only happens to be there, would mislead a reader.
    model_class = find_native(model_type, [])
    declared = {*model_class.config_defaults, *getattr(model_class, "config_names", {})}
    only_for_completion = {"use_sliding_window", "max_window_layers", "num_local_experts"}
    only_for_completion |= {"no_rope_layer_interval", "interleave_moe_layer_step", "sliding_window_pattern"}
    only_for_completion |= {"full_attention_interval", "full_attn_idxs", "mamba_expand"}
    if "shape" in read:
        only_for_completion |= {"num_key_value_heads", "head_dim", "global_head_dim", "num_global_key_value_heads"}
        only_for_completion |= {"attention_k_eq_v", "num_kv_shared_layers", "layer_types", "use_double_wide_mlp"}
        only_for_completion |= {"rope_parameters", "use_bidirectional_attention"}
        # experts must be asked for
        only_for_completion |= {"num_experts", "top_k_experts", "moe_intermediate_size"}
    only_for_completion |= {"attn_layer_indices", "mamba_d_ssm", "hybrid_override_pattern", "mamba_hidden_act"}
    only_for_completion |= {"hidden_act"} if model_type in ("mamba", "falcon_mamba") else set()
    only_for_completion |= {"num_kv_heads", "num_ln_in_parallel_attn"}
    only_for_completion |= {"block_ff_dim", "tie_embedding", "rotary_dim", "sliding_window_size"}
    unread = set(model_class.config_defaults) - read - only_for_completion
    # dense layers among those with experts are rare, and convolutions must be asked for
    rarely_read = {"sliding_window", "intermediate_size", "intermediate_size_mlp", "conv_bias", "conv_L_cache"}
    assert unread <= rarely_read, "no model file reads these"
    assert read - ROPE - MADE - declared <= {"head_dim", "attention_bias", "mlp_bias", "layer_types"} | (
        # follows from d_model
        {"hidden_size"} if model_type == "whisper" else set()
    ) | (
        # follows from whether the head is tied
        {"scale_decoder_outputs"} if model_type in ("t5", "umt5") else set()
    ), "not declared"


@pytest.mark.parametrize(
    ("model_type", "text", "tower"),
    [
        ("llava", "llama", "clip_vision_model"),
        ("llava", "qwen2", "siglip_vision_model"),
        ("llava", "mistral", "pixtral"),
        ("llava_next", "mistral", "clip_vision_model"),
        ("mistral3", "ministral3", "pixtral"),
        ("internvl", "qwen2", "internvl_vision"),
    ],
)
def test_what_a_joined_model_leaves_out(model_type, text, tower, tmp_path):
    from transformers import AutoConfig

    values = {"text_config": {"model_type": text}, "vision_config": {"model_type": tower}}
    if model_type != "mistral3":
        values["vision_feature_select_strategy"] = TOWERS[tower]
    write(tmp_path, model_type=model_type, **values)
    theirs, own = AutoConfig.from_pretrained(tmp_path), ours(tmp_path)
    for name, value in vars(own.vision).items():
        # squares are said by their height and width there
        assert getattr(theirs.vision_config, name) in (value, (value, value)), name
    recorder = Recorder(own.text)
    with torch.device("meta"):
        own.text_class(recorder, 64)
    assert {"vocab_size", "tie_word_embeddings", "hidden_size"} <= recorder.read
    # the whole has the head
    assert own.text.tie_word_embeddings == theirs.tie_word_embeddings
    for name in sorted(recorder.read - ROPE - {"tie_word_embeddings"}):
        assert getattr(own.text, name, MISSING) == getattr(theirs.text_config, name, MISSING), name
    whole = set(find_native(model_type, []).config_defaults)
    whole -= {"text_config", "vision_config", "tie_word_embeddings", "vision_feature_select_strategy"}
    for name in whole - ({"multimodal_projector_bias"} if model_type == "internvl" else set()):
        assert getattr(own, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    ("model_type", "values", "is_tied"),
    [
        ("llava", {}, False),
        ("llava", {"tie_word_embeddings": True}, True),
        ("llava", {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        # published ones say nothing and have a head, which is taken for what it is
        ("mistral3", {}, True),
        ("mistral3", {"tie_word_embeddings": True}, True),
        ("mistral3", {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ("mistral3", {"text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_where_a_joined_model_says_that_its_head_is_tied(model_type, values, is_tied, tmp_path):
    text = {"model_type": "mistral", **values.get("text_config", {})}
    vision = {"model_type": "pixtral" if model_type == "mistral3" else "clip_vision_model"}
    write(tmp_path, **{**values, "model_type": model_type, "text_config": text, "vision_config": vision})
    assert ours(tmp_path).text.tie_word_embeddings is is_tied


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"vision_feature_layer": -14}, "vision_feature_layer=-14: must be numbers of layers, from -13 to 12"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"vision_feature_layer": [1, "x"]}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "must be 'default' with a tower of the kind clip_vision_model"),
        ({"vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 7}}, "no multiple"),
        ({"vision_config": {"hidden_act": "swish3"}}, "vision_config.hidden_act='swish3': must be one of"),
        ({"projector_hidden_act": None}, "projector_hidden_act"),
        ({"text_config": {"model_type": "opt"}}, "text_config.model_type must be one of llama"),
    ],
)
def test_a_joined_model_that_cannot_be(values, why, tmp_path):
    whole = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}, **values}
    with pytest.raises(ModelError, match=why), torch.device("meta"):
        find_native("llava", [])(ours(write(tmp_path, **whole)), 64)


@pytest.mark.parametrize("model_type", ["internvl", "mistral3"])
def test_a_joined_model_whose_tower_gives_one_layer(model_type, tmp_path):
    whole = {"model_type": model_type, "text_config": {"model_type": "qwen2"}, "vision_config": {}}
    assert ours(write(tmp_path, **whole)).vision_feature_layer == -1
    with pytest.raises(ModelError, match=r"vision_feature_layer=\[-2, -5\]: must be the number of one layer"):
        ours(write(tmp_path, **whole, vision_feature_layer=[-2, -5]))


@pytest.mark.parametrize("model_type", ENCODERS)
def test_what_config_json_of_an_encoder_leaves_out(model_type, tmp_path):
    read = assert_same(write(tmp_path, model_type=model_type))
    assert set(find_native(model_type, []).config_defaults) == read - {"position_embedding_type", "is_decoder"}


def test_lfm2_as_it_was_published_names_two_keys_otherwise(tmp_path):
    names = {"hidden_size": 1024, "num_hidden_layers": 2, "block_ff_dim": 6656, "tie_embedding": False}
    assert_same(write(tmp_path, model_type="lfm2", full_attn_idxs=[1], **names))
    config = ours(tmp_path)
    assert (config.intermediate_size, config.tie_word_embeddings) == (6656, False)


@pytest.mark.parametrize("name", TINY)
def test_what_transformers_saves_is_read_back(name, tmp_path):
    make_config(name).save_pretrained(tmp_path)
    assert_same(tmp_path)


@pytest.mark.parametrize("name", TINY)
def test_a_full_file_says_the_same_with_all_defaults_written_out(name, tmp_path):
    config = make_config(name)
    write(tmp_path, **{**json.loads(config.to_json_string(use_diff=False)), "model_type": config.model_type})
    assert_same(tmp_path)


OLD = {
    "theta": {"rope_theta": 500_000.0, "torch_dtype": "float16"},
    "null_scaling": {"rope_theta": 500_000.0, "rope_scaling": None},
    "scaling": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_theta": 1e6, "rope_scaling": YARN | {"original_max_position_embeddings": 32}},
    "both": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
    "partial": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("model_type", LLAMA_LIKE)
@pytest.mark.parametrize("spelling", OLD)
def test_old_spellings_are_read(model_type, spelling, tmp_path):
    changes = {"max_position_embeddings": 128, **OLD[spelling]}
    assert_same(write(tmp_path, model_type=model_type, **SIZES, **{"num_key_value_heads": 2, **changes}))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_null_heads_of_keys_are_as_many_as_of_queries(model_type, tmp_path):
    assert_same(write(tmp_path, model_type=model_type, **SIZES, num_key_value_heads=None))


def test_mistral_may_leave_heads_of_keys_null_as_well(tmp_path):
    """Transformers refuses it, so there is nothing to compare with."""
    assert ours(write(tmp_path, model_type="mistral", **SIZES, num_key_value_heads=None)).num_key_value_heads == 4


WINDOWS = {
    "off": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    "on": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "everywhere": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "null": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
    "named": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_of_qwen_are_those_of_transformers(model_type, kind, tmp_path):
    assert_same(write(tmp_path, model_type=model_type, **SIZES, num_key_value_heads=2, **WINDOWS[kind]))


@pytest.mark.parametrize("values", [{"sliding_window": None}, {"sliding_window": 16, "head_dim": 24}])
def test_the_window_of_mistral(values, tmp_path):
    assert_same(write(tmp_path, model_type="mistral", **SIZES, num_key_value_heads=2, **values))


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 100, "n_ctx": 64},
        {"n_embd": 96, "hidden_size": 48, "n_head": 4, "tie_word_embeddings": False},
    ],
)
def test_gpt2_under_both_names(values, tmp_path):
    assert_same(write(tmp_path, model_type="gpt2", **values))


@pytest.mark.parametrize("spelling", GEMMA3_SPELLINGS)
def test_gemma_3_in_every_spelling(spelling, tmp_path):
    assert_same(write(tmp_path, model_type="gemma3_text", **SIZES, head_dim=12, **GEMMA3_SPELLINGS[spelling]))


@pytest.mark.parametrize("spelling", OLMO3_SPELLINGS)
def test_olmo_3_in_every_spelling(spelling, tmp_path):
    assert_same(write(tmp_path, model_type="olmo3", **SIZES, **OLMO3_SPELLINGS[spelling]))


@pytest.mark.parametrize("spelling", PHI3_SPELLINGS)
def test_phi_3_in_every_spelling(spelling, tmp_path):
    sizes = {**SIZES, "hidden_size": 16}
    assert_same(write(tmp_path, model_type="phi3", **sizes, num_key_value_heads=2, **PHI3_SPELLINGS[spelling]))


@pytest.mark.parametrize("values", [{"rope_theta": 5e4}, {"rope_parameters": {"partial_rotary_factor": 0.75}}])
def test_the_turned_part_of_phi(values, tmp_path):
    assert_same(write(tmp_path, model_type="phi", **SIZES, **values))


@pytest.mark.parametrize("values", [{}, {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}])
def test_the_angles_of_ministral_3(values, tmp_path):
    assert_same(write(tmp_path, model_type="ministral3", **SIZES, num_key_value_heads=2, head_dim=12, **values))


def test_gemma_3_that_looks_ahead_is_refused(tmp_path):
    with pytest.raises(ModelError, match="use_bidirectional_attention=true"):
        ours(write(tmp_path, model_type="gemma3_text", use_bidirectional_attention=True))


MIMO_SPELLINGS = {
    "published": {
        "rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "sliding_window": 128,
        "sliding_window_size": 128, "routed_scaling_factor": None, "attention_value_scale": 0.707,
    },
    "named": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 9,
        "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_value_scale": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", MIMO_SPELLINGS)
def test_mimo_in_every_spelling(spelling, tmp_path):
    shape = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}
    assert_same(write(tmp_path, model_type="mimo_v2_flash", **shape, **MIMO_SPELLINGS[spelling]))


def test_angles_of_one_kind_of_mimos_layers_may_differ(tmp_path):
    given = {"full_attention": {"rope_theta": 7e5}}
    rope = ours(write(tmp_path, model_type="mimo_v2_flash", rope_parameters=given)).rope_parameters
    assert [rope[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [7e5, 1e4]


@pytest.mark.parametrize("last", [-1, 1])
def test_the_last_layer_of_ernie_with_experts_may_be_that_of_the_model(last, tmp_path):
    shape = {"num_hidden_layers": 3, "moe_layer_end_index": last}
    assert "moe_layer_end_index" in assert_same(write(tmp_path, model_type="ernie4_5_moe", **shape))


@pytest.mark.parametrize("more", [{}, {"partial_rotary_factor": 0.25}])
def test_minimax_m2_as_it_was_published_says_how_many_numbers_of_a_head_turn(more, tmp_path):
    shape = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 256}
    assert_same(write(tmp_path, model_type="minimax_m2", **shape, rotary_dim=16, rope_theta=2e6, **more))
    assert RotaryEmbedding.from_config(ours(tmp_path), 64).cos_sin_cache.shape[1] == (8 if more else 16)


def test_opt_350m(tmp_path):
    shape = {"hidden_size": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "num_hidden_layers": 2}
    assert_same(write(tmp_path, model_type="opt", **shape, _remove_final_layer_norm=True))


# ---- values that make no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "large"}, "hidden_size='large' must be a whole number"),
        ({"hidden_size": None}, "hidden_size=None must be a whole number"),
        ({"hidden_size": True}, "hidden_size=True must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
        ({"hidden_size": -64}, "hidden_size=-64 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads=32 is no multiple of num_key_value_heads=3"),
        ({"head_dim": "big"}, "head_dim='big' must be a whole number"),
        ({"layer_types": 3}, "layer_types=3 must be a list"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps='tiny' must be a number"),
        ({"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ({"hidden_act": 3}, "hidden_act=3 must be a text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(values, words, tmp_path):
    with pytest.raises(ModelError, match=words):
        ours(write(tmp_path, model_type="llama", **values))


def test_a_switch_whose_name_sounds_like_a_size_may_be_off(tmp_path):
    config = ours(write(tmp_path, model_type="lfm2", block_auto_adjust_ff_dim=False))
    assert config.block_auto_adjust_ff_dim is False


@pytest.mark.parametrize(("model_type", "key"), [("gpt2", "n_head"), ("opt", "num_attention_heads")])
def test_no_heads_are_refused_everywhere(model_type, key, tmp_path):
    with pytest.raises(ModelError, match=f"{key}=0 must be at least 1"):
        ours(write(tmp_path, model_type=model_type, **{key: 0}))


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": "none"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
    ],
)
def test_what_no_check_foresees_is_one_line_with_the_file(values, tmp_path):
    shape_0_6b_config(tmp_path, **values)
    with pytest.raises(ModelError, match=r"config\.json: Qwen3ForCausalLM cannot be built") as caught:
        load_model(worker_config(tmp_path, load_format="dummy"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "most"), [({"hidden_size": 10**12}, "16,777,216"), ({"num_hidden_layers": 10**6}, "10,000")]
)
def test_sizes_that_no_model_has(values, most, tmp_path):
    shape_0_6b_config(tmp_path, **values)
    with pytest.raises(ModelError, match=f"must be a whole number from 1 to {most}"):
        load_model(worker_config(tmp_path, load_format="dummy"))


@pytest.mark.parametrize(
    "key", ["interleave_moe_layer_step", "no_rope_layer_interval", "floor_scale", "attention_chunk_size"]
)
def test_what_layers_of_llama_4_are_divided_by_is_not_0(key, tmp_path):
    file = make_checkpoint(tmp_path, "llama4") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: 0}))
    with pytest.raises(ModelError, match=f"{key}=0 must be a (whole )?number from (1|0.001)"):
        load_model(worker_config(tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_layer_types_must_fit_the_layers(model_type, tmp_path):
    with pytest.raises(ModelError, match="layer_types names 1 layers, num_hidden_layers is 3"):
        ours(write(tmp_path, model_type=model_type, **SIZES, layer_types=["full_attention"]))


# ---- classes of other packages --------------------------------------------------------------------------------------


class Undeclared:
    """A model class that says nothing about its configuration."""


class Declared:
    config_defaults = {"width": Nullable(4), "names": None, "depth": 2}


def test_a_class_that_declares_nothing_gets_config_json_as_it_is(tmp_path):
    config = read_model_config(tmp_path / "config.json", {"width": 3, "layers": None}, Undeclared)
    assert (config.width, config.layers, getattr(config, "depth", 7)) == (3, None, 7)
    assert not hasattr(config, "depth")
    with pytest.raises(ModelError, match=r"config\.json: no depth"):
        _ = config.depth


def test_null_is_kept_where_it_is_allowed(tmp_path):
    config = read_model_config(tmp_path / "config.json", {"width": None}, Declared)
    assert (config.width, config.names, config.depth) == (None, None, 2)
    with pytest.raises(ModelError, match="depth=None"):
        read_model_config(tmp_path / "config.json", {"depth": None}, Declared)


def test_a_configuration_can_be_copied_and_leaves_its_source_alone(tmp_path):
    values = {"rope_scaling": {"type": "linear"}}
    config = read_model_config(tmp_path / "config.json", values, Undeclared)
    config.rope_scaling["factor"] = 2.0
    twin = copy.deepcopy(config)
    assert isinstance(twin, ModelConfig)
    assert twin.rope_scaling == {"type": "linear", "factor": 2.0}
    assert values == {"rope_scaling": {"type": "linear"}}


def test_a_config_json_alone_makes_a_model(tmp_path):
    shape_0_6b_config(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=300)
    assert len(load_model(worker_config(tmp_path, load_format="dummy")).model.layers) == 1
