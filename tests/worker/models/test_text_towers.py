"""Checkpoints that see, of which the text model alone is served: its logits are those of the whole."""

import logging

import pytest
import torch

from quire.errors import ModelError
from quire.testing.model_harness import ModelHarness, worker_config
from quire.testing.tiny_checkpoints import make_config, widen
from quire.worker.model_loader import load_model

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64}  # fmt: skip
# model_type -> architecture of its text, class that runs it
TOWERS = {
    # with Llama and its like it sees
    "llava": ("olmo2", "Olmo2ForCausalLM"),
    "llama4": ("llama4", "Llama4ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen35TextForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen35MoeTextForCausalLM"),
    "internvl": ("gpt_oss", "GptOssForCausalLM"),
    "llava_onevision": ("olmo2", "Olmo2ForCausalLM"),
}
MORE = {"llava_next": ("olmo2", "Olmo2ForCausalLM"), "idefics3": ("llama", "LlamaForCausalLM"),
        "vipllava": ("llama", "LlamaForCausalLM")}  # fmt: skip


def make_whole(path, model_type, text):
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        model_type, text_config=make_config(text).to_dict(), vision_config=dict(VISION), tie_word_embeddings=False
    )
    # some weights are drawn when a model is made
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    widen(model, 0)
    model.eval().save_pretrained(path)
    return model


def check(path, model_type, text, class_name, prompt):
    whole = make_whole(path, model_type, text)
    if model_type == "llama4":  # Transformers' whole one fails without an image
        whole = whole.language_model
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    model = load_model(worker_config(path))
    assert type(model).__name__ == class_name
    # delta nets: Transformers computes them in chunks by another way
    atol = 2e-3 if "qwen3_5" in model_type else 1e-4
    torch.testing.assert_close(ModelHarness(model).run(0, prompt), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("model_type", TOWERS)
def test_the_text_model_of_a_checkpoint_that_sees_is_served(model_type, tmp_path, prompt, caplog):
    with caplog.at_level(logging.WARNING):
        check(tmp_path, model_type, *TOWERS[model_type], prompt)
    assert f"model_type={model_type}: its text model" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", MORE)
def test_more_of_them(model_type, tmp_path, prompt):
    check(tmp_path, model_type, *MORE[model_type], prompt)


def test_a_text_model_that_looks_ahead_is_refused(tmp_path):
    make_whole(tmp_path, "paligemma", "gemma")
    with pytest.raises(ModelError, match="is not causal by itself"):
        load_model(worker_config(tmp_path))
