import json

import pytest

from quire.errors import ModelError
from quire.testing.model_contract import check_against_transformers
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import ARCHITECTURES, make_checkpoint
from quire.worker.attention import attention_layers
from quire.worker.model_loader import load_model
from quire.worker.models.transformers_fallback import TransformersModel

SERVED = ("gemma2 glm cohere cohere2 stablelm starcoder2 gpt_neox").split()


@pytest.mark.parametrize("name", SERVED)
def test_a_model_of_transformers_computes_the_same_on_paged_attention(name, checkpoint, prompt):
    model = check_against_transformers(checkpoint(name), prompt)
    assert isinstance(model, TransformersModel)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "opt_post_norm",
        "gpt2",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "gemma3",
        "gemma4_moe",
        "smollm3",
        "mimo_v2_flash",
    ],
)
def test_a_native_model_can_be_asked_for_through_transformers(name, checkpoint, prompt):
    model = check_against_transformers(checkpoint(name), prompt, model_impl="transformers")
    assert isinstance(model, TransformersModel)


def test_windows_caps_scales_and_sinks_are_found_by_watching(checkpoint):
    def layers(name):
        model = load_model(worker_config(checkpoint(name), model_impl="transformers"))
        return list(attention_layers(model).values())

    assert [layer.sliding_window for layer in layers("gemma2")] == [24, 0, 24]
    assert [layer.soft_cap for layer in layers("gemma2")] == [50.0] * 3
    assert [layer.sliding_window for layer in layers("gemma3")] == [24, 0, 24]
    assert [layer.scale for layer in layers("granite")] == [0.2] * 3
    assert all(layer.sinks is not None and layer.sinks.shape == (4,) for layer in layers("gpt_oss"))
    assert [(layer.head_dim, layer.value_dim) for layer in layers("deepseek_v3")] == [(32, 24)] * 3
    assert [layer.num_kv_heads for layer in layers("mimo_v2_flash")] == [2, 4, 2]
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers("gemma4_moe")] == [(4, 16), (1, 32)] * 3
    assert [layer.name for layer in layers("gemma2")] == [f"model.layers.{index}.self_attn.attn" for index in range(3)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "linear_attention"),
        ("bloom", "do not call the attention interface"),
        ("llama4", "chunked_attention"),
        ("bert", "not causal"),
        ("bart", "is an encoder-decoder"),
        ("lfm2", "conv"),
        # layers that share keys and values
        ("gemma4", "changes the attention mask by itself"),
    ],
)
def test_what_cannot_work_this_way_is_refused_with_the_reason(name, reason, tmp_path):
    path = make_checkpoint(tmp_path, name)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(worker_config(path, model_impl="transformers"))
    assert f"model_type={ARCHITECTURES[name][0]}" in str(caught.value)


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    config = {"model_type": "bart", "vocab_size": 320, "architectures": ["BartForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_model(worker_config(tmp_path))
    # What the file leaves out, the family says; LongT5 has no causal language model at all.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "longt5", "vocab_size": 320}))
    with pytest.raises(ModelError, match="is an encoder-decoder of a kind that Quire does not run"):
        load_model(worker_config(tmp_path))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size=-64 must be a whole number from 1"),
        ({"vocab_size": 400}, r"embed_tokens.weight \(\[320, 64\] in the checkpoint, \[400, 64\] in the model\)"),
    ],
)
def test_values_that_do_not_fit_are_one_line_and_no_report(values, words, tmp_path, capfd):
    path = make_checkpoint(tmp_path, "gemma")
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    capfd.readouterr()
    with pytest.raises(ModelError, match=words) as caught:
        load_model(worker_config(path))
    assert "\n" not in str(caught.value)
    assert "".join(capfd.readouterr()) == ""


def test_long_rope_is_chosen_by_max_model_len_and_not_by_the_batch(tmp_path, prompt):
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    path = make_checkpoint(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    check_against_transformers(path, prompt, max_model_len=64, model_impl="transformers")
    long = load_model(worker_config(path, max_model_len=256, model_impl="transformers"))
    longer = [*prompt, *prompt[:20]]
    whole = ModelHarness(long).run(0, longer)
    # Transformers takes the long angles as soon as a sequence has more than 64 tokens, as here.
    from quire.testing.model_contract import check_cuts_and_mixtures, transformers_logits

    check_cuts_and_mixtures(long, longer, transformers_logits(path, longer))
    assert (ModelHarness(long).run(0, prompt) - whole[: len(prompt)]).abs().max() < 1e-4


def test_an_unknown_model_type_names_the_native_ones(tmp_path):
    config = {"model_type": "no_such_model", "vocab_size": 320, "architectures": ["NoSuchForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"no_such_model.*llama.*qwen3"):
        load_model(worker_config(tmp_path))


def test_code_of_a_checkpoint_is_not_run_unless_asked_for(tmp_path):
    config = {
        "model_type": "no_such_model", "vocab_size": 320,
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('the code of the checkpoint was run')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(worker_config(tmp_path))


def test_a_native_file_with_another_head_is_refused(tmp_path):
    path = make_checkpoint(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForTokenClassification"]}))
    with pytest.raises(ModelError, match="LlamaForTokenClassification"):
        load_model(worker_config(path))


def test_missing_weights_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, "gemma2")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing.*model.layers.1.self_attn.q_proj.weight"):
        load_model(worker_config(path))


def test_random_weights_need_only_the_configuration(checkpoint, tmp_path, prompt):
    (tmp_path / "config.json").write_text((checkpoint("gemma2") / "config.json").read_text())
    model = load_model(worker_config(tmp_path, load_format="dummy"))
    assert ModelHarness(model).run(0, prompt).isfinite().all()
